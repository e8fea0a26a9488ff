"""Calls of users' functions in threads and in the event loop, with warnings of blocking.

    function          `DaemonThread`: in order, and the caller awaits; a call that never returns keeps its thread
    async function    `ObservedAwaitable` reports when the function holds the event loop

Both hand over what the function does: its value or its exception. A process that a function forks ends when the
function returns in it. `envs/environments` and `envs/tools` add deadlines and outcomes.
"""

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, Protocol

CallResult = tuple[Any, BaseException | None]
"""Value of a function, and its exception."""
MAX_BLOCKING_SECONDS = 0.1
LATE_SECONDS = 1.0
"""Lateness of a timer from which the event loop counts as paused."""
log = logging.getLogger(__name__)
_abandoned_tasks: set["asyncio.Task[Any]"] = set()


def call_function(function: Callable[[], Any]) -> CallResult:
    """Calls a function, and returns its value or its exception, SystemExit included."""
    try:
        return function(), None
    except BaseException as error:
        return None, error


class DaemonThread:
    """Thread that calls functions one after another, so that objects bound to a thread work.

    The thread starts with the first function. It does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[[], Any]) -> "asyncio.Future[CallResult]":
        """Calls a function in the thread; the future of the running loop gets the result."""
        loop, own_pid = asyncio.get_running_loop(), os.getpid()
        future: asyncio.Future[CallResult] = loop.create_future()

        def set_result(result: CallResult) -> None:
            if not future.done():
                future.set_result(result)

        def run() -> None:
            if future.done():  # its deadline passed behind a call that hangs
                return
            result = call_function(function)
            if os.getpid() != own_pid:
                os._exit(0)  # a child that the function forked must not continue the run
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(set_result, result)

        self._jobs.put(run)
        if self.thread is None:
            thread = threading.Thread(target=self._run_jobs, name=self.name, daemon=True)
            try:
                thread.start()
                self.thread = thread
            except RuntimeError as error:  # the process has too many threads
                future.set_result((None, error))
        return future

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """Ends the thread after the functions that are submitted."""
        self._jobs.put(None)


class SegmentObserver(Protocol):
    """Observer of the segments in which a function of a user holds the event loop."""

    def enter(self, place: str) -> None:
        """Notes that the function at this place continues."""

    def leave(self) -> None:
        """Notes that the function waits or has ended."""


class BlockingCalls:
    """Observer that warns once of each function that blocks the event loop.

    A thread looks at the running function, so that a function which never returns is named too.

    remedy: end of the message, in the imperative.
    """

    def __init__(self, remedy: str = "write def instead of async def", seconds: float = MAX_BLOCKING_SECONDS) -> None:
        self.remedy, self.seconds = remedy, seconds
        self.thread: threading.Thread | None = None
        self._running: tuple[str, float] | None = None
        self._reported_places: set[str] = set()
        self._end = threading.Event()

    def enter(self, place: str) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._watch, name="blocking calls", daemon=True)
            self.thread.start()
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
        place = running[0]
        self._reported_places.add(place)
        message = "%s blocks the event loop for more than %g s, and all episodes wait; %s"
        log.warning(message, place, self.seconds, self.remedy)

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()


class ObservedAwaitable:
    """Awaitable that reports to an observer each segment in which it holds the event loop."""

    def __init__(self, awaitable: Awaitable[Any], observer: SegmentObserver, place: str) -> None:
        self.awaitable, self.observer, self.place, self.own_pid = awaitable, observer, place, os.getpid()

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self.awaitable.__await__()
        resume, value = inner.send, None
        while True:
            self.observer.enter(self.place)
            try:
                yielded = resume(value)
            except StopIteration as stop:
                return stop.value
            except GeneratorExit as error:
                if isinstance(value, GeneratorExit):  # the loop ends, and closes the function
                    raise
                raise RuntimeError("the function raised GeneratorExit") from error
            finally:
                if os.getpid() != self.own_pid:
                    os._exit(0)  # a child that the function forked must not continue the run
                self.observer.leave()
            try:
                value = yield yielded
                resume = inner.send
            except BaseException as error:  # passed on to the function
                value, resume = error, inner.throw


async def wait_for_future(future: "asyncio.Future[Any]", seconds: float | None) -> bool:
    """Waits for a future or task at most `seconds`; returns whether it is done.

    A late one is cancelled, but not waited for, since a function of a user may refuse to end. So is the future of a
    cancelled caller. Time in which the event loop was paused, as between two collections of a run, does not count.
    """
    loop, left = asyncio.get_running_loop(), seconds
    try:
        while left is None or left > 0:
            due = loop.time() + (left or 0.0)
            await asyncio.wait({future}, timeout=left)
            if future.done():
                return True
            lateness = loop.time() - due
            left = lateness if lateness > LATE_SECONDS else 0.0
    except asyncio.CancelledError:
        _abandon(future)
        raise
    _abandon(future)
    return False


def _abandon(future: "asyncio.Future[Any]") -> None:
    """Cancels a future, and keeps a task until it ends."""
    future.cancel()
    if not isinstance(future, asyncio.Task):
        return
    _abandoned_tasks.add(future)

    def forget(task: "asyncio.Task[Any]") -> None:
        _abandoned_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, else asyncio logs an error

    future.add_done_callback(forget)
