"""Runs the code of a tool with a deadline, in a thread or coroutine.

An exception of the tool is an outcome, and is not raised. A thread cannot be ended from outside, so a call beyond its
deadline stays in its thread. A coroutine is cancelled at its deadline.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from envs.tools.results import result_text
from envs.user_calls import DaemonThread, ObservedAwaitable, SegmentObserver, wait_for_future

Outcome = str | BaseException
"""Text of a tool's value, or the exception that the tool raised."""


class DeadlineExceeded(TimeoutError):
    """A call of a tool that exceeded its deadline."""


async def call_in_thread(
    thread: DaemonThread, function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float | None
) -> Outcome:
    """Calls a function in a thread.

    The outcome is `DeadlineExceeded` if the call takes longer than `seconds`.
    """
    future = thread.submit(partial(_call_for_text, function, arguments))
    if not await wait_for_future(future, seconds):
        return _late_call(seconds)
    text, error = future.result()
    return text if error is None else error


class DaemonThreads:
    """Threads that run functions side by side, as many as are needed at a time.

    A thread whose call exceeds its deadline ends after this call. All others are used again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._idle: list[DaemonThread] = []
        self._is_stopped = False

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float | None) -> Outcome:
        """Calls a function as `call_in_thread`."""
        thread = self._idle.pop() if self._idle else DaemonThread(self.name)
        try:
            outcome = await call_in_thread(thread, function, arguments, seconds)
        except asyncio.CancelledError:
            thread.stop()
            raise
        if self._is_stopped or isinstance(outcome, DeadlineExceeded):
            thread.stop()
        else:
            self._idle.append(thread)
        return outcome

    def stop(self) -> None:
        """Ends the threads after their functions."""
        self._is_stopped = True
        while self._idle:
            self._idle.pop().stop()


def _call_for_text(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    value = function(**arguments)
    return result_text(asyncio.run(value) if inspect.iscoroutine(value) else value)


async def call_in_loop(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    seconds: float | None,
    observer: SegmentObserver,
    place: str,
) -> Outcome:
    """Awaits an async function.

    observer: of the segments in which the function holds the event loop. place: its name there. The outcome is
    `DeadlineExceeded` if the call takes longer than `seconds`.
    """

    async def call() -> Outcome:
        try:
            return result_text(await ObservedAwaitable(function(**arguments), observer, place))
        except BaseException as error:  # a task that raises SystemExit would end the loop
            return error

    return await wait_for_outcome(asyncio.ensure_future(call()), seconds)


async def wait_for_outcome(future: "asyncio.Future[Outcome]", seconds: float | None) -> Outcome:
    """Waits for an outcome at most `seconds`.

    The caller's cancellation cancels the future and is raised.
    """
    return future.result() if await wait_for_future(future, seconds) else _late_call(seconds)


def _late_call(seconds: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"took longer than {seconds:g} s")
