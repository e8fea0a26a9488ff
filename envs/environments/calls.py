"""Calls functions of environments under a deadline, and turns their exceptions into `EpisodeError`.

    async function    runs in the event loop
    other function    runs in the thread of its environment; in a worker process in the event loop

An exception of any kind, SystemExit included, is the episode's.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from envs.environments.interface import EpisodeError
from envs.user_calls import DaemonThread, ObservedAwaitable, SegmentObserver, wait_for_future
from envs.user_code import describe_exception

Result = TypeVar("Result")


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

    async def call(
        self, place: str, function: Callable[..., Any], *arguments: Any, read: Callable[[Any], Result]
    ) -> Result:
        """Calls an async or other function, and reads its result where the function runs.

        place: class and method, for messages. read: converts the result, whose methods are a user's code too. A call
        over its deadline is cancelled, but not waited for.

        Raises:
            EpisodeError: the function or `read` raised an exception.
            EnvironmentTimeout: the function did not return in time.
        """
        task = asyncio.ensure_future(self._call(place, function, arguments, read))
        if not await wait_for_future(task, self.seconds):
            raise EnvironmentTimeout(late_call(place, self.seconds))
        if task.cancelled():
            raise EpisodeError(f"{place} cancelled its own task")
        return task.result()

    async def _call(
        self, place: str, function: Callable[..., Any], arguments: tuple[Any, ...], read: Callable[[Any], Result]
    ) -> Result:
        def call_and_read() -> Result | Awaitable[Any]:
            value = function(*arguments)
            return value if inspect.isawaitable(value) else read(value)

        async def await_and_read() -> Result:
            value = function(*arguments)
            return read(await value if inspect.isawaitable(value) else value)

        try:
            if self.thread is None or is_async(function):
                return cast(Result, await ObservedAwaitable(await_and_read(), self.observer, place))
            result, error = await self.thread.submit(call_and_read)
            if error is not None:
                raise error if isinstance(error, EpisodeError) else _episode_error(place, error) from error
            return read(await result) if inspect.isawaitable(result) else cast(Result, result)
        except (EpisodeError, GeneratorExit):  # GeneratorExit: the loop ends
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _episode_error(place, error) from error
        except BaseException as error:  # SystemExit too would end the event loop
            if isinstance(error, KeyboardInterrupt) and self.thread is not None and is_async(function):
                raise  # Ctrl-C of the user
            raise _episode_error(place, error) from error

    def close(self) -> None:
        """Ends the thread of the environment, if it has one."""
        if self.thread is not None:
            self.thread.stop()


def _episode_error(place: str, error: BaseException) -> EpisodeError:
    return EpisodeError(f"{place}: {describe_exception(error)}")


def late_call(place: str, seconds: float) -> str:
    """Returns the message on a call that exceeded its deadline."""
    return f"{place} did not return within env.step_timeout_s={seconds:g}"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of the function only makes a coroutine."""
    return inspect.iscoroutinefunction(function)
