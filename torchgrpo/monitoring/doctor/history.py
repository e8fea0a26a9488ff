"""History for the rules: newest metrics, last evaluations, steps that taught nothing."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from config.schema.config import Config

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
IDLE_STEPS = 5
"""Steps in a row that taught nothing, after which the run says so."""


class Change(NamedTuple):
    """Means of one metric over the oldest and the newest rows of the window; most: the largest value in it."""

    before: float
    now: float
    most: float = math.inf

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
        if not self.seen:
            self._first_accuracy = _accuracy(row)
        self.seen += 1
        self._changes = {}
        self.rows.append(row)
        self.overlapped |= "idle/engines" in row  # only that of a batch's first epoch has it
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
        for name in [name for name in row if name.startswith("eval/") and name.endswith("/pass@1")]:
            score = Score(row[name], row[f"{name}_low"], row[f"{name}_high"], reward)
            best, _ = self.scores.get(name, (score, score))
            self.scores[name] = (score if score.value >= best.value else best, score)

    def newest(self, count: int) -> list[Row]:
        """The last rows, the oldest of them first; fewer at the beginning of a run."""
        return list(islice(reversed(self.rows), count))[::-1]

    def change(self, name: str) -> Change | None:
        """The change of a metric within the window; None before it holds both ends, or without the metric."""
        if name not in self._changes:
            before = [row[name] for row in islice(self.rows, ENDS) if name in row]
            now = [row[name] for row in islice(reversed(self.rows), ENDS) if name in row]
            self._changes[name] = None
            if len(self.rows) >= 2 * ENDS and len(before) == len(now) == ENDS:
                most = max(row[name] for row in self.rows if name in row)
                self._changes[name] = Change(mean(before), mean(now), most)
        return self._changes[name]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _accuracy(row: Row) -> float:
    accuracy: float = row.get("reward/accuracy", row["reward/mean"])
    return accuracy


def teaches(row: Row, config: Config) -> bool:
    """Whether a step's gradient came from rewards or a teacher, not from the KL to the reference alone."""
    moved = 0 < row["grad_norm"] < math.inf
    if config.policy.teaches_equal_rewards:
        return bool(moved and row["sample_utilization"] > 0)
    equal = row["reward/zero_variance_groups"] >= 1 and not row.get("reward/length")
    if equal and config.policy.baseline != "none":
        return False
    some = row["advantage/std"] > 0 or row["advantage/mean"] != 0
    return bool(some and moved)


def explanation(rows: Sequence[Row], config: Config) -> tuple[str, str]:
    """Why these steps taught nothing, in figures, and what helps."""

    def share(name: str) -> float:
        return mean([row.get(name, 0.0) for row in rows])

    found: list[str] = []
    helps: list[str] = []
    if share("reward/errors") >= 0.5:
        found.append(f"{share('reward/errors'):.0%} of the answers could not be judged")
        helps.append("mend the reward (run=rewards tries it on saved answers)")
    from_rewards = not config.policy.teaches_equal_rewards
    if from_rewards and share("reward/zero_variance_groups") >= 1:
        reward = share("reward/mean")
        found.append(f"all {config.optim_batch_groups} groups had equal rewards (mean {reward:.2f})")
    if share("reward/invalid") >= 0.5:
        found.append(f"{share('reward/invalid'):.0%} of the answers were invalid")
        helps.append("see what the model writes in the printed samples")
    if share("length/truncated") >= 0.5:
        limit = config.inference_model.max_tokens
        found.append(f"{share('length/truncated'):.0%} of the answers were cut at {limit} tokens")
        helps.append("raise inference_model.max_tokens")
    if share("sample_utilization") == 0:
        found.append("no answer was in the loss")
        if config.policy.filter_range is not None:
            helps.append(f"widen policy.filter_range={config.policy.filter_range}")
        if config.policy.filter_truncated:
            helps.append("set policy.filter_truncated=false")
    if not all(math.isfinite(row["grad_norm"]) for row in rows):
        found.append("gradients were not finite")
        helps.append("lower optimizer.lr")
    if config.policy.distill_coef != 0 and share("sample_utilization") > 0 and share("kl/teacher") == 0:
        found.append("the teacher finds every token as likely as the policy does")
        helps.append("another teacher (ref_model.name), or one that sees the answer (policy=opsd)")
    if from_rewards and any(row["grad_norm"] > 0 for row in rows) and config.policy.kl_coef > 0:
        found.append("only the KL to the reference moved the weights")
    if from_rewards and share("reward/zero_variance_groups") >= 1 and share("reward/errors") < 0.5:
        if mean([row.get("reward/accuracy", row["reward/mean"]) for row in rows]) >= 1:
            helps.append("harder prompts: every answer is right")
        else:
            helps.append("compare the printed samples with what the reward asks for")
            helps.append(
                "take easier prompts, a larger env.repeats, or a reward with more steps between 0 and 1"
            )
    why = ", ".join(found) or "the gradient was zero"
    return f"{why[0].upper()}{why[1:]}", "; ".join(helps) or "look at grad_norm and lr"
