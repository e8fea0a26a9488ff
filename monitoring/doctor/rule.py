"""A rule and a finding: what is worth worrying about, and that it was seen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from monitoring.doctor.history import History

Severity = Literal["info", "warning", "alarm"]
"""info: it costs time alone. warning: less is learned than could be. alarm: going on is useless, or does harm."""


class Seen(NamedTuple):
    """What a rule saw, in figures. cause, knob: where this case tells more than the rule does."""

    text: str
    cause: str = ""
    knob: str = ""


Look = Callable[[History], Seen | None]
"""Whether a rule holds after the newest row: what was seen, or None."""


@dataclass(frozen=True)
class Rule:
    """One thing that is worth worrying about.

    metrics: names that it reads; a K stands for any number, PART and SET for any name.
    when: when it holds, in words. cause: what is likely behind it. knob: the config key that helps, and how.
    """

    name: str
    severity: Severity
    metrics: tuple[str, ...]
    when: str
    cause: str
    knob: str
    look: Look


@dataclass(frozen=True)
class Finding:
    """A rule that held. first_step, last_step: the optimizer steps at which it did so first and last."""

    rule: str
    severity: Severity
    first_step: int
    last_step: int
    text: str
    cause: str
    knob: str

    @property
    def line(self) -> str:
        """What is said of it while the run goes on."""
        return f"{self.severity}: {self.text}. {self.cause}. What helps: {self.knob}"
