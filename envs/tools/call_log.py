"""Counts the calls of tools, and logs the first failure of each tool."""

import inspect
import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

CallOutcome = Literal["ok", "error", "unknown", "malformed", "timeout"]
log = logging.getLogger(__name__)


@dataclass
class CallCounts:
    """Numbers of calls of one tool."""

    calls: int = 0
    errors: int = 0
    malformed_calls: int = 0
    timeouts: int = 0


@dataclass
class CallLog:
    """Counts of calls, and warnings that are logged once for each tool.

    Args:
        by_tool: counts by the name of a tool.
        unknown: number of calls of tools that do not exist.
    """

    by_tool: dict[str, CallCounts] = field(default_factory=dict)
    unknown: int = 0
    _warning_keys: set[tuple[str, str]] = field(default_factory=set)

    def count(self, name: str, outcome: CallOutcome) -> None:
        """Adds one call."""
        if outcome == "unknown":
            self.unknown += 1
            return
        counts = self.by_tool.setdefault(name, CallCounts())
        counts.calls += 1
        counts.errors += outcome == "error"
        counts.malformed_calls += outcome == "malformed"
        counts.timeouts += outcome == "timeout"

    def totals(self) -> dict[str, int]:
        """Returns the numbers of all tools together by the name of their metric."""
        tools = self.by_tool.values()
        return {
            "calls": sum(each.calls for each in tools) + self.unknown,
            "errors": sum(each.errors for each in tools),
            "malformed": sum(each.malformed_calls for each in tools),
            "unknown": self.unknown,
            "timeouts": sum(each.timeouts for each in tools),
        }

    def warn_of_failure(self, name: str, error: BaseException, function: Callable[..., Any] | None) -> None:
        """Logs the first exception of a tool.

        The message has the notes of the exception, and its place in the file of the function.
        """
        if self._is_first("failure", name):
            notes: list[str] = getattr(error, "__notes__", [])
            log.warning(
                "tool %s failed, and the model reads the error: %s%s",
                *(name, "; ".join([describe_error(error), *notes]), _place_of_error(error, function)),
            )

    def warn_of_blocking(self, name: str, function: Callable[..., Any], seconds: float) -> None:
        """Logs that a coroutine held the event loop."""
        if self._is_first("blocking", name):
            log.warning(
                "tool %s%s ran %.1f s without an await, and all episodes waited; write it with def instead of async "
                "def, so that it runs in a thread",
                *(name, _place_of_function(function), seconds),
            )

    def _is_first(self, kind: str, name: str) -> bool:
        is_first = (kind, name) not in self._warning_keys
        self._warning_keys.add((kind, name))
        return is_first


def describe_error(error: BaseException) -> str:
    """Returns type and message of an exception, whose `__str__` may fail too."""
    message = "(its message cannot be read)"
    with suppress(Exception):
        message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _source_file(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a function in C, or an object that can be called
        return None


def _place_of_function(function: Callable[..., Any]) -> str:
    file = _source_file(function)
    return f" ({file})" if file else ""


def _place_of_error(error: BaseException, function: Callable[..., Any] | None) -> str:
    """Returns file and line of an exception.

    This is the last line of the function's own file in the traceback, or the last line of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own_file = _source_file(function) if function is not None else None
    own_frames = [frame for frame in frames if frame.filename == own_file] or frames[-1:]
    return f" ({own_frames[-1].filename}:{own_frames[-1].lineno})" if own_frames else ""
