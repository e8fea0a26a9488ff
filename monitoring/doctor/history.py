"""History for the rules: newest metrics, last evaluations, steps that taught nothing."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from config.schema import Config

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""
WINDOW = 200
"""Rows of optimizer steps that are remembered."""
ENDS = 10
"""Rows at either end of the window whose means a trend compares."""
SOLVED = 0.9
"""Accuracy from which equal rewards and a small entropy are what success looks like."""
RISE = 0.02
"""A difference between two means of rewards or shares from which one of them counts as higher."""
PASS = "/pass@1"


class Change(NamedTuple):
    """Means of one metric over the oldest and the newest rows of the window."""

    before: float
    now: float

    @property
    def rose(self) -> bool:
        return self.now > self.before + RISE

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.now:.3g}"


@dataclass
class Score:
    """The score of a set in one evaluation.

    low, high: ends of its 95% interval. reward: mean of the training rows before it; NaN until there is one.
    """

    value: float
    low: float
    high: float
    reward: float


class History:
    """One run up to its newest row, in bounded memory."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rows: deque[Row] = deque(maxlen=WINDOW)
        self.on_policy: deque[Row] = deque(maxlen=WINDOW)
        """Those of the first optimizer step of an iteration in lockstep."""
        self.idle: deque[Row] = deque(maxlen=WINDOW)
        """The last steps, where they taught nothing."""
        self.scores: dict[str, tuple[Score, Score]] = {}
        """Of each evaluated set the best score and the newest."""
        self.seen = 0
        self.taught = 0
        self.solved = False
        self.overlapped = False
        """Whether the run is one of grpo_async.py."""
        self._first_accuracy = 0.0
        self._changes: dict[str, Change | None] = {}

    @property
    def step(self) -> int:
        """The newest optimizer step."""
        return int(self.rows[-1]["optimizer_step"])

    def take(self, row: Row) -> None:
        """The row of an optimizer step."""
        if not self.seen:
            self._first_accuracy = _accuracy(row)
        self.seen += 1
        self._changes = {}
        self.rows.append(row)
        self.overlapped = (
            self.overlapped or "idle/engines" in row
        )  # only that of a batch's first epoch has it
        lockstep = not self.overlapped or self.config.train.max_policy_age == 0
        if lockstep and (row["optimizer_step"] - 1) % self.config.optimizer_steps_per_iteration == 0:
            self.on_policy.append(row)
        if teaches(row, self.config):
            self.taught += 1
            self.idle.clear()
        else:
            self.idle.append(row)
        for score in [score for pair in self.scores.values() for score in pair if math.isnan(score.reward)]:
            score.reward = row["reward/mean"]
        accuracy = mean([_accuracy(each) for each in self.newest(5)])
        self.solved = accuracy >= SOLVED and accuracy >= self._first_accuracy + 0.1

    def take_evaluation(self, row: Row) -> None:
        """The row of an evaluation of one set or several."""
        reward = mean([each["reward/mean"] for each in self.newest(ENDS)]) if self.rows else math.nan
        for name in [name for name in row if name.startswith("eval/") and name.endswith(PASS)]:
            score = Score(row[name], row[f"{name}_low"], row[f"{name}_high"], reward)
            best, _ = self.scores.get(name, (score, score))
            self.scores[name] = (score if score.value >= best.value else best, score)

    def newest(self, count: int) -> list[Row]:
        """The last rows, the oldest of them first; fewer at the beginning of a run."""
        return list(islice(reversed(self.rows), count))[::-1]

    def change(self, name: str) -> Change | None:
        """The change of a metric within the window.

        None before the window holds both ends, or where a row has no such metric.
        """
        if name not in self._changes:
            self._changes[name] = self._change(name)
        return self._changes[name]

    def _change(self, name: str) -> Change | None:
        if len(self.rows) < 2 * ENDS:
            return None
        before = [row[name] for row in islice(self.rows, ENDS) if name in row]
        now = [row[name] for row in islice(reversed(self.rows), ENDS) if name in row]
        if len(before) < ENDS or len(now) < ENDS:
            return None
        return Change(mean(before), mean(now))

    def rose(self, name: str) -> bool:
        """Whether a metric is higher at the end of the window than at its beginning."""
        change = self.change(name)
        return change is not None and change.rose


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def _accuracy(row: Row) -> float:
    accuracy: float = row.get("reward/accuracy", row["reward/mean"])
    return accuracy


def teaches(row: Row, config: Config) -> bool:
    """Whether a step's gradient came from rewards or a teacher.

    The other source is the KL to the reference.
    """
    moved = 0 < row["grad_norm"] < math.inf
    if config.policy.teaches_equal_rewards:
        return bool(moved and row["sample_utilization"] > 0)
    equal = row["reward/zero_variance_groups"] >= 1 and not row.get("reward/length")
    if equal and config.policy.baseline != "none":
        return False
    some = row["advantage/std"] > 0 or row["advantage/mean"] != 0
    return bool(some and moved)
