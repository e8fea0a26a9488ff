"""Calls functions of environments under a deadline, and turns their exceptions into `EpisodeError`.

    async function    runs in the event loop
    other function    runs in the thread of its environment; in a worker process in the event loop

An exception of any kind, SystemExit included, is the episode's.
"""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envs.environments.interface import EpisodeError
from envs.user_calls import DaemonThread, ObservedAwaitable, SegmentObserver, wait_for_future
from envs.user_code import describe_exception


class EnvironmentTimeout(EpisodeError):
    """Call of an environment that did not return in time, and may still run."""


@dataclass
class CallRunner:
    """Calls functions of one environment.

    seconds: deadline of a call, `env.step_timeout_s`. observer: of functions that hold the event loop. thread: calls
        functions that are not async; None in a process that only runs environments.
    """

    seconds: float
    observer: SegmentObserver
    thread: DaemonThread | None

    async def call(self, place: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls an async or other function and returns its result.

        place: class and method, for messages. A call over its deadline is cancelled, but not waited for.

        Raises:
            EpisodeError: the function raised an exception.
            EnvironmentTimeout: the function did not return in time.
        """
        task = asyncio.ensure_future(self._call(place, function, arguments))
        if await wait_for_future(task, self.seconds):
            return task.result()
        raise EnvironmentTimeout(late_call(place, self.seconds))

    async def _call(self, place: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            if self.thread is None or is_async(function):
                return await ObservedAwaitable(_await_result(function, arguments), self.observer, place)
            result, error = await self.thread.submit(lambda: function(*arguments))
            if error is not None:
                raise error
            return await result if inspect.isawaitable(result) else result
        except (EpisodeError, GeneratorExit):
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EpisodeError(f"{place}: {describe_exception(error)}") from error
        except BaseException as error:  # SystemExit too would end the event loop
            if isinstance(error, KeyboardInterrupt) and self.thread is not None and is_async(function):
                raise  # Ctrl-C of the user
            raise EpisodeError(f"{place}: {describe_exception(error)}") from error

    def close(self) -> None:
        """Ends the thread of the environment, if it has one."""
        if self.thread is not None:
            self.thread.stop()


async def _await_result(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result


def late_call(place: str, seconds: float) -> str:
    """Returns the message on a call that exceeded its deadline."""
    return f"{place} did not return within env.step_timeout_s={seconds:g}"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of the function only makes a coroutine."""
    return inspect.iscoroutinefunction(function)
