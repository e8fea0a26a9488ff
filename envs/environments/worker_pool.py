"""Runs environments in worker processes, each with the environments of several episodes.

    make ─▶ WorkerEnvironment ─ reset ─▶ worker with the fewest episodes (`worker_process`) ─▶ Observation
                              ─ step ──▶ the same worker                                    ─▶ Step

A worker whose call holds it beyond `env.step_timeout_s`, or that dies, is killed with all processes that it started,
and replaced. Its episodes end as errors; those of other workers go on. All processes end with this process.
"""

import asyncio
import itertools
import mmap
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.environments.calls import late_call
from envs.environments.interface import EpisodeError, Observation, Step
from envs.environments.worker_process import HEARTBEAT, read_message, write_message
from envs.example import Example, Message
from envs.reward_workers.fork_server_process import ForkServerDied, ForkServerProcess
from envs.reward_workers.worker import IDLE, PROGRESS
from envs.user_calls import DaemonThread

SERVE = "envs.environments.worker_process:serve"
CHECK_SECONDS = 0.2
"""Interval between two looks at the calls that run in the workers."""
SILENT_SECONDS = 2.0
"""Time beyond the deadline of a call after which an event loop without a heartbeat counts as blocked."""


@dataclass(eq=False)
class WorkerConnection:
    """Connection to one worker process.

    calls: futures of unanswered calls, each with the method's name for messages. num_episodes: episodes that are not
    closed. problem: reason of the worker's end; empty while it runs.
    """

    pid: int
    page: mmap.mmap
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: dict[int, tuple[asyncio.Future[Any], str]] = field(default_factory=dict)
    num_episodes: int = 0
    problem: str = ""

    def running_call(self) -> tuple[int, float]:
        """Returns the call that holds the worker, or IDLE, and its seconds so far."""
        call_id, start = PROGRESS.unpack_from(self.page, 0)
        return (call_id, time.monotonic() - start) if start else (IDLE, 0.0)

    def silent_seconds(self) -> float:
        """Returns the seconds since the worker's event loop last ran."""
        (last_beat,) = HEARTBEAT.unpack_from(self.page, PROGRESS.size)
        return time.monotonic() - float(last_beat)


class EnvironmentWorkers:
    """Pool of `env.environment_workers` processes.

    Raises:
        ConfigError: from the first reset, if the environment cannot be loaded in another process.
    """

    def __init__(self, env: EnvConfig) -> None:
        self.env, self.name, self.seconds = env, env.environment or "", env.step_timeout_s
        self.max_workers = env.environment_workers or 1
        self.workers: list[WorkerConnection] = []
        self._fork_server = ForkServerProcess(SERVE, env)
        self._requests = DaemonThread("environment workers")
        self._lock = asyncio.Lock()
        self._ids = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def make(self) -> "WorkerEnvironment":
        """Makes the environment of one episode; its reset chooses the worker."""
        return WorkerEnvironment(self, next(self._ids))

    async def choose_worker(self) -> WorkerConnection:
        """Returns the worker with the fewest episodes, after the start of missing workers."""
        async with self._lock:
            while len(self.workers) < self.max_workers:
                self.workers.append(await self._start_worker())
        return min(self.workers, key=lambda worker: worker.num_episodes)

    async def _start_worker(self) -> WorkerConnection:
        try:
            pid, descriptor, page = await self._request(self._fork)
        except ForkServerDied:  # its workers died with it
            await self._request(self._fork_server.close)
            self._fork_server = ForkServerProcess(SERVE, self.env)
            pid, descriptor, page = await self._request(self._fork)
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
        HEARTBEAT.pack_into(page, PROGRESS.size, time.monotonic())
        worker = WorkerConnection(pid, page, reader, writer)
        for coroutine in (self._read_results(worker), self._enforce_deadline(worker)):
            self._spawn(coroutine)
        return worker

    def _fork(self) -> tuple[int, int, mmap.mmap]:
        problem = self._fork_server.wait_until_ready("env.environment")
        if problem is not None:
            raise ConfigError(
                f"env.environment={self.name}: the environment cannot be loaded in a worker process: {problem}"
            )
        return self._fork_server.fork()

    async def _request(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a method of the fork server, which blocks, in the thread of requests."""
        result, error = await self._requests.submit(lambda: function(*arguments))
        if error is not None:
            raise error
        return result

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, worker: WorkerConnection, episode: int, method: str, argument: Any = None) -> Any:
        """Calls a method in a worker.

        Raises:
            EpisodeError: the method failed or was too late, or its worker ended.
        """
        place = f"{self.name}.{method}"
        if worker.problem:
            raise EpisodeError(f"{place}: {worker.problem}")
        call_id, answer = next(self._ids), asyncio.get_running_loop().create_future()
        worker.calls[call_id] = answer, place
        try:
            write_message(worker.writer, (call_id, episode, method, argument))
        except Exception as error:  # an example may hold any object
            del worker.calls[call_id]
            raise EpisodeError(f"{place}: the example cannot be sent to a worker process: {error}") from error
        try:
            return await answer
        finally:
            worker.calls.pop(call_id, None)

    async def _read_results(self, worker: WorkerConnection) -> None:
        """Passes results on until the worker ends."""
        try:
            while True:
                call_id, is_error, result = await read_message(worker.reader)
                answer, _ = worker.calls.get(call_id, (None, ""))
                if answer is None or answer.done():
                    continue
                if is_error:
                    answer.set_exception(EpisodeError(result))
                else:
                    answer.set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._end_worker(worker, "its worker process died")

    async def _enforce_deadline(self, worker: WorkerConnection) -> None:
        """Ends the worker if a call or a left task holds it for too long."""
        limit = f"env.step_timeout_s={self.seconds:g}"
        while not worker.problem:
            running_id, seconds = worker.running_call()
            if running_id != IDLE and seconds > self.seconds:
                problem = f"its worker process was killed, because a call of another episode exceeded {limit}"
                await self._end_worker(worker, problem, running_id)
                return
            if running_id == IDLE and worker.silent_seconds() > self.seconds + SILENT_SECONDS:
                problem = f"its worker process was killed, because its event loop was blocked longer than {limit}"
                await self._end_worker(worker, problem)
                return
            await asyncio.sleep(min(CHECK_SECONDS, self.seconds))

    async def _end_worker(self, worker: WorkerConnection, problem: str, late_call_id: int = IDLE) -> None:
        """Fails the episodes of a worker, and kills all its processes.

        problem: reason for all calls but `late_call_id`, which exceeded its deadline.
        """
        if worker.problem:
            return
        self.workers.remove(worker)
        self._fail_calls(worker, problem, late_call_id)
        async with self._lock:
            try:
                await self._request(self._fork_server.kill, worker.pid)
            except ForkServerDied:
                return  # the next start replaces the fork server

    def _fail_calls(self, worker: WorkerConnection, problem: str, late_call_id: int = IDLE) -> None:
        """Ends the connection to a worker, and fails its calls."""
        worker.problem = problem
        for call_id, (answer, place) in worker.calls.items():
            if not answer.done():
                is_late = call_id == late_call_id
                message = late_call(place, self.seconds) if is_late else f"{place}: {problem}"
                answer.set_exception(EpisodeError(message))
        worker.writer.close()

    async def close(self) -> None:
        """Ends all processes. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self.workers:
            self._fail_calls(worker, "the run has ended")
        self.workers = []
        for task in self._tasks:
            task.cancel()
        await self._request(self._fork_server.close)
        self._requests.stop()


@dataclass
class WorkerEnvironment:
    """Environment of one episode in a worker process."""

    pool: EnvironmentWorkers
    episode: int
    worker: WorkerConnection | None = None

    async def reset(self, example: Example) -> Observation:
        self.worker = await self.pool.choose_worker()
        self.worker.num_episodes += 1
        observation: Observation = await self.pool.call(self.worker, self.episode, "reset", example)
        return observation

    async def step(self, turn: Message) -> Step:
        assert self.worker is not None
        step: Step = await self.pool.call(self.worker, self.episode, "step", turn)
        return step

    async def close(self) -> None:
        if self.worker is None:
            return
        self.worker.num_episodes -= 1
        if not self.worker.problem:
            try:
                await self.pool.call(self.worker, self.episode, "close")
            except EpisodeError:
                return  # the worker has ended, and with it the environment
