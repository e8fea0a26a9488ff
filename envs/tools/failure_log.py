"""Logs the first failure of each tool, with its place in the user's file."""

import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any

from envs.user_calls import BlockingCalls
from envs.user_code import describe_error

log = logging.getLogger(__name__)


class FailureLog:
    """Logs the first failure of each tool.

    blocking_calls: observer that names async tools which block the event loop.
    """

    def __init__(self) -> None:
        self.blocking_calls = BlockingCalls()
        self._reported_names: set[str] = set()

    def warn_of_failure(self, name: str, error: BaseException, function: Callable[..., Any] | None) -> None:
        """Logs the first exception of a tool.

        The message has the notes of the exception, and its place in the file of the function.
        """
        if name in self._reported_names:
            return
        self._reported_names.add(name)
        notes: list[str] = getattr(error, "__notes__", [])
        log.warning(
            "tool %s failed, and the model reads the error: %s%s",
            *(name, "; ".join([describe_error(error), *notes]), _place_of_error(error, function)),
        )


def source_file(function: Callable[..., Any]) -> str | None:
    """Returns the file of a function, or None if it has no source."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a function in C, or an object that can be called
        return None


def _place_of_error(error: BaseException, function: Callable[..., Any] | None) -> str:
    """Returns file and line of an exception.

    This is the last line of the function's own file in the traceback, or the last line of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own_file = source_file(function) if function is not None else None
    own_frames = [frame for frame in frames if frame.filename == own_file] or frames[-1:]
    return f" ({own_frames[-1].filename}:{own_frames[-1].lineno})" if own_frames else ""
