"""Calls functions of users under a deadline, and turns their exceptions into `EpisodeError`.

    async function    runs in the event loop; `BlockingCalls` names a function that blocks the loop
    other function    runs in a thread of its environment, which a call that never returns keeps

An exception of any kind, SystemExit included, is the episode's. A process that a function forks ends when the function
returns in it.
"""

import asyncio
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.environments.interface import EpisodeError
from envs.user_code import describe_exception

MAX_BLOCKING_SECONDS = 0.1
LATE_SECONDS = 1.0
"""Lateness of a timer from which the event loop counts as paused."""
log = logging.getLogger(__name__)
_abandoned_tasks: set[asyncio.Task[Any]] = set()


class EnvironmentTimeout(EpisodeError):
    """Call of an environment that did not return in time, and may still run."""


class SegmentObserver(Protocol):
    """Observer of the segments in which a function of a user holds the event loop."""

    def enter(self, place: str) -> None:
        """Notes that the function at this place continues."""

    def leave(self) -> None:
        """Notes that the function waits or has ended."""


class BlockingCalls:
    """Observer that warns once of each function that blocks the event loop.

    A thread looks at the running function, so that a function which never returns is named too.
    """

    def __init__(self, seconds: float = MAX_BLOCKING_SECONDS) -> None:
        self.seconds = seconds
        self._running: tuple[str, float] | None = None
        self._reported_places: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, place: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="blocking calls", daemon=True)
            self._thread.start()
        self._running = (place, time.monotonic())

    def leave(self) -> None:
        running, self._running = self._running, None
        self._report(running)

    def _watch(self) -> None:
        while not self._end.wait(self.seconds):
            self._report(self._running)

    def _report(self, running: tuple[str, float] | None) -> None:
        if running is None or time.monotonic() - running[1] <= self.seconds or running[0] in self._reported_places:
            return
        self._reported_places.add(running[0])
        log.warning(
            "%s blocks the event loop for more than %g s, and all episodes wait; write def instead of async def, or "
            "set env.environment_workers",
            running[0],
            self.seconds,
        )

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()


class EnvironmentThread:
    """Daemon thread for the calls of one environment.

    Objects that are bound to a thread work in it. The thread starts with the first call. A thread pool could be
    exhausted by calls that never return.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in the thread, and returns its result or raises its exception."""
        loop, own_pid = asyncio.get_running_loop(), os.getpid()
        outcome: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

        def finish(result: Any, error: Exception | None) -> None:
            if not outcome.done():
                outcome.set_result((result, error))

        def call() -> None:
            result, error = _outcome(function, arguments)
            if os.getpid() != own_pid:
                os._exit(0)
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(finish, result, error)

        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_calls, name="environment", daemon=True)
            self._thread.start()
        result, error = await outcome
        if error is not None:
            raise error
        return result

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def close(self) -> None:
        """Ends the thread after its calls."""
        self._calls.put(None)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Returns a function's result, or None and its exception."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error
    except BaseException as error:  # KeyboardInterrupt would end the event loop
        return None, RuntimeError(describe_exception(error))


class LoopCalls:
    """Calls in the event loop, for processes that only run environments."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function, and returns its result or raises its exception."""
        result, error = _outcome(function, arguments)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Does nothing."""


@dataclass
class CallRunner:
    """Calls functions of one environment.

    seconds: deadline of a call, `env.step_timeout_s`. sync_calls: runs functions that are not async.
    """

    seconds: float
    observer: SegmentObserver
    sync_calls: EnvironmentThread | LoopCalls
    own_pid: int = field(default_factory=os.getpid)

    async def call(self, place: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls an async or other function and returns its result.

        place: class and method, for messages. A call over its deadline is cancelled, but not waited for.

        Raises:
            EpisodeError: the function raised an exception.
            EnvironmentTimeout: the function did not return in time.
        """
        task = asyncio.ensure_future(self._call_observed(place, function, arguments))
        try:
            has_ended = await wait_for_task(task, self.seconds)
        except asyncio.CancelledError:
            _abandon(task)
            raise
        if has_ended:
            return task.result()
        _abandon(task)
        raise EnvironmentTimeout(late_call(place, self.seconds))

    async def _call_observed(self, place: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            result = self._result(function, arguments)
            if isinstance(self.sync_calls, EnvironmentThread) and not is_async(function):
                return await result  # the function does not hold the loop
            return await ObservedAwaitable(result, self.observer, place, self.own_pid)
        except (EpisodeError, KeyboardInterrupt, GeneratorExit):
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EpisodeError(f"{place}: {describe_exception(error)}") from error
        except BaseException as error:  # SystemExit too would end the event loop
            raise EpisodeError(f"{place}: {describe_exception(error)}") from error

    async def _result(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        result = function(*arguments) if is_async(function) else await self.sync_calls.run(function, *arguments)
        return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Ends the thread of the environment, if it has one."""
        self.sync_calls.close()


class ObservedAwaitable:
    """Awaitable that reports to an observer each segment in which it holds the event loop."""

    def __init__(self, awaitable: Awaitable[Any], observer: SegmentObserver, place: str, own_pid: int) -> None:
        self.awaitable, self.observer, self.place, self.own_pid = awaitable, observer, place, own_pid

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self.awaitable.__await__()
        resume, value = inner.send, None
        while True:
            self.observer.enter(self.place)
            try:
                yielded = resume(value)
            except StopIteration as stop:
                return stop.value
            finally:
                if os.getpid() != self.own_pid:
                    os._exit(0)  # a child that the function forked must not continue the run
                self.observer.leave()
            try:
                value = yield yielded
                resume = inner.send
            except BaseException as error:  # passed on to the function
                value, resume = error, inner.throw


def late_call(place: str, seconds: float) -> str:
    """Returns the message on a call that exceeded its deadline."""
    return f"{place} did not return within env.step_timeout_s={seconds:g}"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of the function only makes a coroutine."""
    return inspect.iscoroutinefunction(function)


async def wait_for_task(task: "asyncio.Task[Any]", seconds: float) -> bool:
    """Waits for a task; returns False after the deadline.

    Time in which the event loop was paused, as between two collections of a run, does not count.
    """
    loop, left = asyncio.get_running_loop(), seconds
    while left > 0:
        due = loop.time() + left
        await asyncio.wait({task}, timeout=left)
        if task.done():
            return True
        lateness = loop.time() - due
        left = lateness if lateness > LATE_SECONDS else 0.0
    return False


def _abandon(task: "asyncio.Task[Any]") -> None:
    """Cancels a task without waiting, since a function of a user may refuse to end."""
    task.cancel()
    _abandoned_tasks.add(task)

    def forget(ended_task: "asyncio.Task[Any]") -> None:
        _abandoned_tasks.discard(ended_task)
        if not ended_task.cancelled():
            ended_task.exception()  # marks the exception as retrieved, else asyncio logs an error

    task.add_done_callback(forget)
