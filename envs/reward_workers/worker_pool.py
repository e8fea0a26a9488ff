"""Forks and kills reward workers on request, and exchanges batches and results with them.

`fork_server` forks the processes; `worker` is their main loop.
"""

import mmap
import pickle
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from config.schema.errors import ConfigError
from envs.example import Completion, Example
from envs.reward_workers.fork_server_process import ForkServerProcess
from envs.reward_workers.scoring import ScoringResult
from envs.reward_workers.worker import IDLE, PROGRESS, pack_batch, unpack_results
from envs.task import Task

AHEAD_BYTES = 48 << 10
"""Largest batch for a busy worker, far below the smallest default buffer of a Unix socket."""
_SERVE = "envs.reward_workers.fork_server:serve"
PROCESS_DIED = "the worker process died"


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
        self._setup = (module, name, task.env, int(memory_gib * 2**30))
        self.workers: list[WorkerHandle] = []
        self._start()

    def _start(self) -> None:
        self._fork_server = ForkServerProcess(_SERVE, self._setup)

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Process of the fork server."""
        return self._fork_server.process

    def restart(self) -> None:
        """Replaces a dead fork server, whose workers died with it, by a new one."""
        self.close()
        self._start()

    def is_ready(self) -> bool:
        """Whether workers can be forked without waiting for the fork server's imports."""
        return self._fork_server.is_ready()

    def add_worker(self) -> WorkerHandle:
        """Forks a worker, once the fork server is ready."""
        problem = self._fork_server.wait_until_ready("the reward service")
        if problem is not None:
            raise ConfigError(f"env.reward: the reward cannot be loaded in a worker process: {problem}")
        pid, connection, page = self._fork_server.fork()
        worker = WorkerHandle(pid, Connection(connection), page)
        self.workers.append(worker)
        return worker

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
        self._fork_server.kill(worker.pid)

    def close(self) -> None:
        """Ends every process. Safe to call twice."""
        for worker in self.workers:
            worker.close()
        self.workers = []
        self._fork_server.close()
