"""Interface of the trackers, to which a run sends its metrics.

A tracker is one run in one service that `logging.backend` names; each service has a module in `trackers/`. All
methods may raise or hang, because `tracker_threads.py` calls them from a separate thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig

CLOSE_S = 60.0
"""Maximum seconds for a tracker to send its remaining data at the end of a run."""


@dataclass(frozen=True)
class CompletionRow:
    """Row of the table of completions that trackers get at intervals."""

    prompt: str
    completion: str
    reward: float
    advantage: float


COLUMNS: list[Any] = ["step", *(field.name for field in fields(CompletionRow))]


class Tracker(Protocol):
    """One run in one tracking service."""

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        """Logs the metrics of an optimizer step or of an evaluation."""

    def completions(self, rows: Sequence[CompletionRow], step: int) -> None:
        """Logs a table of some completions of an optimizer step."""

    def close(self, outcome: RunOutcome) -> None:
        """Sends the remaining data and ends the run.

        The next run of a sweep is then a separate run in the service.
        """


OnMessage = Callable[[str], None]
"""Receives a message for the user."""


@dataclass(frozen=True)
class TrackerFactory:
    """Factory of a tracker: `FACTORY` in the tracker's module.

    package: package that the tracker imports. install: arguments of `pip install` for a missing package; None:
    the package's name. open: creates the tracker from the `logging` section, the run's folder, a title, all
    settings, and a callback for messages to the user.
    """

    package: str
    open: Callable[[LoggingConfig, Path, str, dict[str, Any], OnMessage], Tracker]
    install: str | None = None


def iterate_dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields settings with dotted keys; an empty section such as `env.options` is kept."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from iterate_dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
