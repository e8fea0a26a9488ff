"""Worker processes as the service sees them: started, given batches, read from, replaced.

The processes themselves are in `fork_server`, which forks them, and in `worker`, which is what they run.
"""

import json
import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from config.schema.errors import ConfigError, DeadlineError
from envs.example import Completion, Example
from envs.judging.fork_server import FORK, KILL
from envs.judging.outcome import Result
from envs.judging.worker import IDLE, PROGRESS, pack, unpack
from envs.task import Task

START_SECONDS = 120.0
REPLY_SECONDS = 30.0
AHEAD_BYTES = 48 << 10
"""Far below the smallest default buffer of a Unix socket."""
_BODY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envs.judging.fork_server import serve; serve(int(sys.argv[2]))"
)
DIED = "its process died"


class ForkServerDied(Exception):
    """The process that forks the workers was killed from outside or by a verification."""


@dataclass(frozen=True)
class LostWorker:
    """A worker that died or has to be ended.

    running: index of the verification that ran, or IDLE. seconds: that it had taken. unanswered: indices without a
    result, in order. reason: DIED, or the deadline that it broke. judged: it had sent results. retired: it made room
    for a fresh one by itself.
    """

    running: int
    seconds: float
    unanswered: list[int]
    reason: str
    judged: bool = False
    retired: bool = False

    @property
    def died(self) -> bool:
        """Whether it ended through no deadline."""
        return self.reason == DIED


@dataclass(eq=False)
class Worker:
    """One judging process.

    unanswered: indices that it was given and has sent no result for, in order. judged, retired: as in `LostWorker`.
    """

    pid: int
    connection: Connection
    page: mmap.mmap
    unanswered: dict[int, None] = field(default_factory=dict)
    batches: int = 0
    judged: bool = False
    retired: bool = False

    def send(self, items: list[tuple[int, Completion, Example]]) -> bool:
        """Queue a batch; return False where it must wait.

        A busy worker does not read, so a batch sent ahead must fit into the socket's buffer.

        Raises:
            OSError: the worker is dead.
        """
        message = pickle.dumps(pack(items), pickle.HIGHEST_PROTOCOL)
        if self.batches and len(message) > AHEAD_BYTES:
            return False
        self.unanswered.update(dict.fromkeys(index for index, _, _ in items))
        self.batches += 1
        self.connection.send_bytes(message)
        return True

    def receive(self) -> list[tuple[int, Result]]:
        """The next portion of results, by index. Raises EOFError or OSError from a dead worker."""
        results, done, self.retired = unpack(self.connection.recv())
        self.judged = True
        for index, _ in results:
            del self.unanswered[index]
        self.batches -= done
        return results

    def lost(self, reason: str) -> LostWorker:
        """Describe the loss of this worker, from one reading of its page.

        It may go on to its next verification before it is ended.
        """
        return LostWorker(*self.running(), list(self.unanswered), reason, self.judged, self.retired)

    def running(self) -> tuple[int, float]:
        """Index of the verification that runs now (or IDLE) and the seconds that it has taken.

        The page of a worker that has not begun any is all zeros."""
        index, began = PROGRESS.unpack_from(self.page, 0)
        return (index, time.monotonic() - began) if began else (IDLE, 0.0)

    def close(self) -> None:
        self.connection.close()
        self.page.close()


class Pool:
    """A fork server and the workers that it forked.

    Raises:
        ConfigError: the task or its reward cannot be loaded in a process of its own.
    """

    def __init__(self, task: Task, memory_gib: float) -> None:
        module, name = type(task).__module__, type(task).__qualname__
        if module == "__main__" or "<locals>" in name:
            raise ConfigError(
                f"task {name}: reward workers import it by name, which {module} cannot give; define it at the top "
                "of a module of its own"
            )
        self._task = (module, name, task.env, int(memory_gib * 2**30))
        self.workers: list[Worker] = []
        self._start()

    def _start(self) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BODY, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._handshake = Connection(os.dup(self.control.fileno()))
        self._handshake.send(self._task)
        self._ready = False

    def restart(self) -> None:
        """A new fork server in the place of one that died; its workers died with it."""
        self.close()
        self._start()

    def is_ready(self) -> bool:
        """Whether workers can be had without waiting for the fork server's imports."""
        return self._ready or self._handshake.poll(0)

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        if not self._handshake.poll(START_SECONDS):
            raise DeadlineError(
                f"the reward service waited {START_SECONDS:.0f} s for its first process to start"
            )
        try:
            trouble = self._handshake.recv()
        except (EOFError, ConnectionError):
            trouble = f"its process ended with exit code {self.process.wait(REPLY_SECONDS)}"
        self._handshake.close()
        if trouble is not None:
            raise ConfigError(f"the reward cannot be loaded in a worker process: {trouble}")
        self._ready = True
        self.control.settimeout(REPLY_SECONDS)

    def add_worker(self) -> Worker:
        self._wait_until_ready()
        pid, (connection, page) = self._ask(FORK)
        worker = Worker(int(pid), Connection(connection), mmap.mmap(page, mmap.PAGESIZE))
        os.close(page)
        self.workers.append(worker)
        return worker

    def _ask(self, message: bytes) -> tuple[bytes, list[int]]:
        """The fork server's reply, and the descriptors that come with it."""
        try:
            self.control.sendall(message)
            reply, descriptors, _, _ = socket.recv_fds(self.control, 64, 2)
        except ConnectionError as error:
            raise ForkServerDied from error
        if not reply:
            raise ForkServerDied
        return reply, descriptors

    def present(self, workers: Iterable[Worker]) -> Iterator[Worker]:
        """Skip workers that are lost by the time their turn comes; one loss can be that of all."""
        return (worker for worker in workers if worker in self.workers)

    def remove_worker(self, worker: Worker) -> None:
        """Kill it and whatever it started. Raises ForkServerDied where the killer is gone itself."""
        self.workers.remove(worker)
        worker.close()
        self._ask(KILL + str(worker.pid).encode())

    def close(self) -> None:
        """End every process. Safe to call twice."""
        for worker in self.workers:
            worker.close()
        self.workers = []
        self._handshake.close()
        self.control.close()
        try:
            self.process.wait(REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
