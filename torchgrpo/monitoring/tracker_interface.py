"""Interface of a tracker: one run in one of the services that `logging.backend` names, a file of `trackers/` for each.

All of its methods may raise or hang: `tracking.py` calls them from a thread of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig

CLOSE_S = 60.0
"""How long a tracker may take at the end of a run to send what it still holds."""


@dataclass(frozen=True)
class ShownCompletion:
    """One row of the table of completions that trackers get now and then."""

    prompt: str
    completion: str
    reward: float
    advantage: float


COLUMNS: list[Any] = ["step", *(field.name for field in fields(ShownCompletion))]


class Tracker(Protocol):
    """One run in one tracker."""

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of an optimizer step or of an evaluation."""

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        """A table of some of what was written in the step."""

    def close(self, outcome: RunOutcome) -> None:
        """Send what is left and end the run, so that the next one of a sweep is another."""


Tell = Callable[[str], None]


@dataclass(frozen=True)
class OpenTracker:
    """The way to a tracker: OPEN of its file.

    package: that it imports. open: makes it, of the `logging` section, the run's folder, a title, all settings and what
    tells the user a line. install: what pip takes where the package is missing; None: its name.
    """

    package: str
    open: Callable[[LoggingConfig, Path, str, dict[str, Any], Tell], Tracker]
    install: str | None = None


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with dotted keys; `env.options`, which is empty, stays."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
