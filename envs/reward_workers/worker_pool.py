"""Forks and kills reward workers on request, and exchanges batches and results with them.

`fork_server` forks the processes; `worker` is their main loop.
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
from envs.reward_workers.fork_server import FORK, KILL
from envs.reward_workers.scoring import ScoringResult
from envs.reward_workers.worker import IDLE, PROGRESS, pack_batch, unpack_results
from envs.task import Task

START_SECONDS = 120.0
REPLY_SECONDS = 30.0
AHEAD_BYTES = 48 << 10
"""Largest batch for a busy worker, far below the smallest default buffer of a Unix socket."""
_FORK_SERVER_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envs.reward_workers.fork_server import serve; serve(int(sys.argv[2]))"
)
PROCESS_DIED = "the worker process died"


class ForkServerDied(Exception):
    """Death of the fork server, killed from outside or by a verification."""


@dataclass(frozen=True)
class LostWorker:
    """State of a worker that died or has to be killed.

    running_index: index of the running verification, or IDLE. seconds: its duration so far. pending_indices:
    indices without a result, in order. reason: PROCESS_DIED, or the deadline that the worker broke.
    has_retired: the worker ended by itself for a fresh one.
    """

    running_index: int
    seconds: float
    pending_indices: list[int]
    reason: str
    has_sent_results: bool = False
    has_retired: bool = False

    @property
    def has_died(self) -> bool:
        """Whether the worker died without a deadline."""
        return self.reason == PROCESS_DIED


@dataclass(eq=False)
class WorkerHandle:
    """Connection of the service to one worker process.

    page: shared page with the worker's progress. pending_indices: sent indices without a result, in order.
    num_batches: number of unfinished batches.
    """

    pid: int
    connection: Connection
    page: mmap.mmap
    pending_indices: dict[int, None] = field(default_factory=dict)
    num_batches: int = 0
    has_sent_results: bool = False
    has_retired: bool = False

    def send(self, items: list[tuple[int, Completion, Example]]) -> bool:
        """Sends a batch; returns False if the batch has to wait.

        A busy worker does not read, so a batch sent ahead must fit into the socket's buffer.

        Raises:
            OSError: the worker is dead.
        """
        message = pickle.dumps(pack_batch(items), pickle.HIGHEST_PROTOCOL)
        if self.num_batches and len(message) > AHEAD_BYTES:
            return False
        self.pending_indices.update(dict.fromkeys(index for index, _, _ in items))
        self.num_batches += 1
        self.connection.send_bytes(message)
        return True

    def receive(self) -> list[tuple[int, ScoringResult]]:
        """Receives the next chunk of results, by index; a dead worker raises EOFError or OSError."""
        results, done, self.has_retired = unpack_results(self.connection.recv())
        self.has_sent_results = True
        for index, _ in results:
            del self.pending_indices[index]
        self.num_batches -= done
        return results

    def describe_lost_worker(self, reason: str) -> LostWorker:
        """Describes the loss of this worker, from one reading of its page.

        A single reading matters because the worker may start its next verification before its end.
        """
        return LostWorker(
            *self.running_verification(), list(self.pending_indices), reason, self.has_sent_results, self.has_retired
        )

    def running_verification(self) -> tuple[int, float]:
        """Returns the index of the running verification, or IDLE, and its duration in seconds.

        The page is all zeros before the worker's first verification.
        """
        index, start_time = PROGRESS.unpack_from(self.page, 0)
        return (index, time.monotonic() - start_time) if start_time else (IDLE, 0.0)

    def close(self) -> None:
        self.connection.close()
        self.page.close()


class WorkerPool:
    """Owns a fork server and the workers that it forked.

    Raises:
        ConfigError: the task or its reward cannot be loaded in another process.
    """

    def __init__(self, task: Task, memory_gib: float) -> None:
        module, name = type(task).__module__, type(task).__qualname__
        if module == "__main__" or "<locals>" in name:
            raise ConfigError(
                f"task {name}: reward workers cannot import the class by name from {module}; define the "
                "class at the top level of a separate module"
            )
        self._task = (module, name, task.env, int(memory_gib * 2**30))
        self.workers: list[WorkerHandle] = []
        self._start()

    def _start(self) -> None:
        self.control, fork_server_end = socket.socketpair()
        with fork_server_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _FORK_SERVER_CODE, json.dumps(sys.path), str(fork_server_end.fileno())],
                pass_fds=[fork_server_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._handshake = Connection(os.dup(self.control.fileno()))
        self._handshake.send(self._task)
        self._ready = False

    def restart(self) -> None:
        """Replaces a dead fork server, whose workers died with it, by a new one."""
        self.close()
        self._start()

    def is_ready(self) -> bool:
        """Whether workers can be forked without waiting for the fork server's imports."""
        return self._ready or self._handshake.poll(0)

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        if not self._handshake.poll(START_SECONDS):
            raise DeadlineError(f"the reward service waited {START_SECONDS:.0f} s for its first process to start")
        try:
            problem = self._handshake.recv()
        except (EOFError, ConnectionError):
            problem = f"the process ended with exit code {self.process.wait(REPLY_SECONDS)}"
        self._handshake.close()
        if problem is not None:
            raise ConfigError(f"env.reward: the reward cannot be loaded in a worker process: {problem}")
        self._ready = True
        self.control.settimeout(REPLY_SECONDS)

    def add_worker(self) -> WorkerHandle:
        """Forks a worker, once the fork server is ready."""
        self._wait_until_ready()
        pid, (connection, page) = self._send_request(FORK)
        worker = WorkerHandle(int(pid), Connection(connection), mmap.mmap(page, mmap.PAGESIZE))
        os.close(page)
        self.workers.append(worker)
        return worker

    def _send_request(self, message: bytes) -> tuple[bytes, list[int]]:
        """Sends a request to the fork server; returns the reply and its descriptors."""
        try:
            self.control.sendall(message)
            reply, descriptors, _, _ = socket.recv_fds(self.control, 64, 2)
        except ConnectionError as error:
            raise ForkServerDied from error
        if not reply:
            raise ForkServerDied
        return reply, descriptors

    def remaining_workers(self, workers: Iterable[WorkerHandle]) -> Iterator[WorkerHandle]:
        """Yields the workers that still belong to the pool when their turn comes.

        The loss of one worker can be the loss of all.
        """
        return (worker for worker in workers if worker in self.workers)

    def remove_worker(self, worker: WorkerHandle) -> None:
        """Kills a worker and all processes that it started.

        Raises:
            ForkServerDied: the fork server, which kills workers, is dead.
        """
        self.workers.remove(worker)
        worker.close()
        self._send_request(KILL + str(worker.pid).encode())

    def close(self) -> None:
        """Ends every process. Safe to call twice."""
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
