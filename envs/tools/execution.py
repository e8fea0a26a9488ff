"""Runs the code of a tool with a deadline, in a thread or coroutine.

An exception of the tool is an outcome, and is not raised.

A thread cannot be ended from outside, so a call beyond its deadline stays in its daemon thread, which does not keep the
process alive. A coroutine is cancelled at its deadline.
"""

import asyncio
import inspect
import queue
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from typing import Any

from envs.tools.results import result_text

Outcome = str | BaseException
"""Text of a tool's value, or the exception that the tool raised."""
BLOCKING_SECONDS = 0.1
"""Longest time that a coroutine may run without an `await`; all episodes wait meanwhile."""


class DeadlineExceeded(TimeoutError):
    """A call of a tool that exceeded its deadline."""


class DaemonThread:
    """Thread that runs functions one after another, so that objects bound to a thread work.

    The thread starts with the first function.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_started = False

    def submit(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> "asyncio.Future[Outcome]":
        """Calls a function in the thread; the future of the running loop gets the outcome."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def run() -> None:
            if future.done():  # its deadline passed behind a call that hangs
                return
            outcome = _call_function(function, arguments)
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(_set_outcome, future, outcome)

        self._jobs.put(run)
        if not self._has_started:
            try:
                threading.Thread(target=self._run_jobs, name=self.name, daemon=True).start()
                self._has_started = True
            except RuntimeError as error:  # the process has too many threads
                future.set_result(error)
        return future

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """Ends the thread after the functions that are submitted."""
        self._jobs.put(None)


def _set_outcome(future: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    try:
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return result_text(value)
    except BaseException as error:  # SystemExit too is an outcome of the user's code
        return error


async def _await_value(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _call_coroutine(
    function: Callable[..., Any], arguments: Mapping[str, Any], report_blocking: Callable[[float], None]
) -> Outcome:
    try:
        return result_text(await _watch_steps(_await_value(function(**arguments)), report_blocking))
    except BaseException as error:  # a task that raises SystemExit would end the loop
        return error


@types.coroutine
def _watch_steps(
    coroutine: Coroutine[Any, Any, Any], report_blocking: Callable[[float], None]
) -> Generator[Any, Any, Any]:
    """Runs a coroutine, and reports a step that holds the event loop for long."""
    resume: Callable[..., Any] = coroutine.send
    value: Any = None
    while True:
        start = time.perf_counter()
        try:
            awaited = resume(value)
        except StopIteration as stop:
            return stop.value
        finally:
            seconds = time.perf_counter() - start
            if seconds > BLOCKING_SECONDS:
                report_blocking(seconds)
        try:
            value = yield awaited
            resume = coroutine.send
        except BaseException as error:
            resume, value = coroutine.throw, error


async def call_in_thread(
    thread: DaemonThread, function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float | None
) -> Outcome:
    """Calls a function in a thread.

    The outcome is `DeadlineExceeded` if the call takes longer than `seconds`.
    """
    return await wait_for_outcome(thread.submit(function, arguments), seconds)


async def call_in_loop(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    seconds: float | None,
    report_blocking: Callable[[float], None],
) -> Outcome:
    """Awaits an async function.

    The outcome is `DeadlineExceeded` if the call takes longer than `seconds`.
    """
    return await wait_for_outcome(asyncio.ensure_future(_call_coroutine(function, arguments, report_blocking)), seconds)


async def wait_for_outcome(future: "asyncio.Future[Outcome]", seconds: float | None) -> Outcome:
    """Waits for an outcome at most `seconds`.

    The caller's cancellation cancels the future and is raised.
    """
    try:
        finished, _ = await asyncio.wait({future}, timeout=seconds)
    except asyncio.CancelledError:
        future.cancel()
        raise
    if not finished:
        future.cancel()
        return DeadlineExceeded(f"took longer than {seconds:g} s")
    return future.result()
