"""Rule of the diagnostics, and the kinds of checks: bounds, trends and functions.

A `Bound` checks the values of one metric. A `Trend` checks the change of a metric while other metrics did not rise. A
`CustomCheck` is a function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from config.schema.config import Config
from torchgrpo.monitoring.diagnostics.metric_history import Change, MetricHistory, Row
from torchgrpo.monitoring.metric_table import pattern_of

Severity = Literal["alarm", "warning", "info"]
"""alarm: the run is useless or harmful. warning: the run learns too little. info: the run loses time only."""
_LOSS_METRICS = ("entropy", "ess", "kl/inference", "logprob_diff/", "loss/clip", "mismatch/", "ratio/")
"""Prefixes of metrics over tokens in the loss, which are 0 without such tokens."""


class Observation(NamedTuple):
    """Observation of a rule in numbers.

    cause, setting: replace the texts of the rule if they are not empty.
    """

    text: str
    cause: str = ""
    setting: str = ""


@dataclass(frozen=True)
class Bound:
    """Limit that a metric violates in each of the newest rows.

    is_violated: whether the values of consecutive rows, newest last, lie beyond the limit.
    on_policy: only the first optimizer step of each iteration in lockstep counts.
    """

    text: str
    is_violated: Callable[[Sequence[float], Config], bool]
    rows: int = 1
    on_policy: bool = False

    @property
    def condition_text(self) -> str:
        rows = f" in {self.rows} rows" if self.rows > 1 else ""
        return f"{self.text}{rows}{' in lockstep' if self.on_policy else ''}"

    def evaluate(self, rule: "Rule", history: MetricHistory) -> Observation | None:
        all_rows = history.on_policy_rows if self.on_policy else history.rows
        if len(all_rows) < self.rows or all_rows[-1] is not history.rows[-1]:
            return None
        newest = [*islice(reversed(all_rows), self.rows)][::-1]
        for name in _matching_names(rule.metrics, newest[-1]):
            rows = [row for row in newest if row["sample_utilization"] > 0 or not name.startswith(_LOSS_METRICS)]
            values = [row[name] for row in rows if name in row]
            if len(values) == self.rows and self.is_violated(values, history.config):
                return Observation(f"{name} is {values[-1]:.3g}{format_step(history)} ({rule.condition_text})")
        return None


@dataclass(frozen=True)
class Trend:
    """Change of a rule's first metric while its other metrics did not rise."""

    condition_text: str
    is_violated: Callable[[Change], bool]

    def evaluate(self, rule: "Rule", history: MetricHistory) -> Observation | None:
        first, *others = rule.metrics
        other_changes = [history.change_of(name) for name in others]
        if any(change is None or change.has_risen for change in other_changes):
            return None
        for name in _matching_names([first], history.rows[-1]):
            change = history.change_of(name)
            if change is not None and self.is_violated(change):
                texts = [f"{name} went {change}" for name, change in zip(others, other_changes, strict=True)]
                context = f" while {' and '.join(texts)}" if texts else ""
                return Observation(f"{name} went {change}{context}{format_step(history)}")
        return None


@dataclass(frozen=True)
class CustomCheck:
    """Check by a function, for conditions that no bound or trend can express."""

    condition_text: str
    evaluate: Callable[["Rule", MetricHistory], Observation | None]


class Condition(NamedTuple):
    """Precondition of a rule's check."""

    text: str
    is_met: Callable[[MetricHistory], bool]


ALWAYS = Condition("", lambda history: True)


@dataclass(frozen=True)
class Rule:
    """Row of the table of rules.

    metrics: names as in monitoring/metric_table.py. cause: likely cause. setting: remedy, mostly a setting.
    """

    name: str
    severity: Severity
    metrics: tuple[str, ...]
    check: Bound | Trend | CustomCheck
    cause: str
    setting: str
    precondition: Condition = ALWAYS

    @property
    def condition_text(self) -> str:
        """Description of the condition under which the rule holds."""
        return f"{self.check.condition_text}{self.precondition.text}"

    def evaluate(self, history: MetricHistory) -> Observation | None:
        """Returns the observation after the newest row if the rule holds, else None."""
        return self.check.evaluate(self, history) if self.precondition.is_met(history) else None


def _matching_names(metrics: Sequence[str], row: Row) -> list[str]:
    """Returns the names in a row that match the metrics of a rule."""
    return [name for name in row if pattern_of(name) in metrics]


def format_step(history: MetricHistory) -> str:
    """Returns the newest optimizer step as the end of an observation."""
    return f" at optimizer step {history.step}"
