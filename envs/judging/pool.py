"""Worker processes as the service sees them: started, given batches, read from, replaced. See `reward_worker`."""

import json
import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

from config.errors import ConfigError, DeadlineError
from envs.judging.worker import FORK, IDLE, KILL, PROGRESS, Verdict, describe, pack
from envs.task import Completion, Example, Task

START_SECONDS = 120.0
ANSWER_SECONDS = 30.0
AHEAD_BYTES = 48 << 10
"""Far below the smallest default buffer of a Unix socket."""
_BODY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envs.judging.worker import start_nursery; start_nursery(int(sys.argv[2]))"
)


class NurseryDied(Exception):
    """The process that forks the workers was killed from outside or by a verification."""


class Worker:
    """One judging process. `unanswered` are the indices that it was given and has not answered, in order."""

    def __init__(self, pid: int, connection: Connection, page: mmap.mmap) -> None:
        self.pid = pid
        self.connection = connection
        self.page = page
        self.unanswered: dict[int, None] = {}
        self.batches = 0

    def give(self, items: list[tuple[int, Completion, Example]]) -> bool:
        """Queue a batch; False where it must wait: a busy worker does not read, so what it is sent ahead must fit
        into the socket's buffer. Raises OSError from a dead worker."""
        message = pickle.dumps(pack(items), pickle.HIGHEST_PROTOCOL)
        if self.batches and len(message) > AHEAD_BYTES:
            return False
        self.unanswered.update(dict.fromkeys(index for index, _, _ in items))
        self.batches += 1
        self.connection.send_bytes(message)
        return True

    def take(self) -> list[Verdict]:
        """The next portion of verdicts. Raises EOFError or OSError from a dead worker."""
        verdicts, done = self.connection.recv()
        for verdict in verdicts:
            del self.unanswered[verdict[0]]
        self.batches -= done
        return verdicts

    def running(self) -> tuple[int, float]:
        """Index of the verification that runs now (or IDLE) and the seconds that it has taken.

        The page of a worker that has not begun any is all zeros."""
        index, began = PROGRESS.unpack_from(self.page, 0)
        return (index, time.monotonic() - began) if began else (IDLE, 0.0)

    def close(self) -> None:
        self.connection.close()
        self.page.close()


class Pool:
    """A nursery and the workers that it forked.

    Raises:
        ConfigError: the task or its reward cannot be loaded in a process of its own.
    """

    def __init__(self, task: Task, memory_gib: float) -> None:
        module, name = describe(task)
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
        self._greeting = Connection(os.dup(self.control.fileno()))
        self._greeting.send(self._task)
        self._greeted = False

    def restart(self) -> None:
        """A new nursery in the place of one that died; its workers died with it."""
        self.close()
        self._start()

    def is_ready(self) -> bool:
        """Whether workers can be had without waiting for the nursery's imports."""
        return self._greeted or self._greeting.poll(0)

    def _wait_for_nursery(self) -> None:
        if self._greeted:
            return
        if not self._greeting.poll(START_SECONDS):
            raise DeadlineError(
                f"the reward service waited {START_SECONDS:.0f} s for its first process to start"
            )
        try:
            trouble = self._greeting.recv()
        except (EOFError, ConnectionError):
            trouble = f"its process ended with exit code {self.process.wait(ANSWER_SECONDS)}"
        self._greeting.close()
        if trouble is not None:
            raise ConfigError(f"the reward cannot be loaded in a worker process: {trouble}")
        self._greeted = True
        self.control.settimeout(ANSWER_SECONDS)

    def add_worker(self) -> Worker:
        self._wait_for_nursery()
        try:
            self.control.sendall(FORK)
            answer, fds, _, _ = socket.recv_fds(self.control, 64, 2)
        except ConnectionError as error:
            raise NurseryDied from error
        if len(fds) != 2:
            raise NurseryDied
        page = mmap.mmap(fds[1], mmap.PAGESIZE)
        os.close(fds[1])
        worker = Worker(int(answer), Connection(fds[0]), page)
        self.workers.append(worker)
        return worker

    def present(self, workers: Iterable[Worker]) -> Iterator[Worker]:
        """Those that are still there when their turn comes: the loss of one can be found to be the loss of all."""
        return (worker for worker in workers if worker in self.workers)

    def remove_worker(self, worker: Worker) -> None:
        """Kill it and whatever it started. Raises NurseryDied where the killer is gone itself."""
        self.workers.remove(worker)
        worker.close()
        try:
            self.control.sendall(KILL + str(worker.pid).encode())
            answered = self.control.recv(1)
        except ConnectionError as error:
            raise NurseryDied from error
        if not answered:
            raise NurseryDied

    def close(self) -> None:
        """End every process. Safe to call twice."""
        for worker in self.workers:
            worker.close()
        self.workers = []
        self._greeting.close()
        self.control.close()
        try:
            self.process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
