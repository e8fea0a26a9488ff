"""Metric history that the rules read: newest rows, evaluations, steps without a gradient."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from config.schema.config import Config

Row = Mapping[str, Any]
"""Row of metrics.jsonl."""
WINDOW = 200
"""Number of newest rows of optimizer steps that are kept."""
TREND_ROWS = 10
"""Number of oldest and of newest rows in the window whose means a trend compares."""
SOLVED_ACCURACY = 0.9
"""Accuracy of a solved task, in which equal rewards and a small entropy are normal."""
MIN_RISE = 0.02
"""Minimum difference of two means of rewards or shares that counts as a rise."""
NO_GRADIENT_STEPS = 5
"""Number of consecutive optimizer steps without a gradient that is reported."""


class Change(NamedTuple):
    """Change of a metric within the window.

    oldest_mean, newest_mean: means over the oldest and the newest rows. maximum: largest value in the window.
    """

    oldest_mean: float
    newest_mean: float
    maximum: float = math.inf

    @property
    def has_risen(self) -> bool:
        return self.newest_mean > self.oldest_mean + MIN_RISE

    def __str__(self) -> str:
        return f"from {self.oldest_mean:.3g} to {self.newest_mean:.3g}"


@dataclass
class EvaluationScore:
    """Score of a set in one evaluation.

    low, high: ends of the 95% interval. reward: mean training reward before the evaluation; NaN until there is
    a row.
    """

    value: float
    low: float
    high: float
    reward: float


class MetricHistory:
    """Metrics of one run up to its newest row, in bounded memory."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rows: deque[Row] = deque(maxlen=WINDOW)
        self.on_policy_rows: deque[Row] = deque(maxlen=WINDOW)
        """Rows of the first optimizer step of each iteration in lockstep."""
        self.no_gradient_rows: deque[Row] = deque(maxlen=WINDOW)
        """Newest rows since the last step with a gradient."""
        self.evaluation_scores: dict[str, tuple[EvaluationScore, EvaluationScore]] = {}
        """Best and newest score of each evaluation set."""
        self.num_steps = 0
        self.num_gradient_steps = 0
        self.is_solved = False
        self.is_overlapped = False
        """Whether the run is a run of grpo_async.py."""
        self._first_accuracy = 0.0
        self._changes: dict[str, Change | None] = {}

    @property
    def step(self) -> int:
        """Number of the newest optimizer step."""
        return int(self.rows[-1]["optimizer_step"])

    def add_step_row(self, row: Row) -> None:
        """Adds the row of an optimizer step."""
        if not self.num_steps:
            self._first_accuracy = _accuracy(row)
        self.num_steps += 1
        self._changes = {}
        self.rows.append(row)
        self.is_overlapped |= "idle/engines" in row  # only the first epoch of a batch logs idle/engines
        lockstep = not self.is_overlapped or self.config.train.max_policy_age == 0
        if lockstep and (row["optimizer_step"] - 1) % self.config.optimizer_steps_per_iteration == 0:
            self.on_policy_rows.append(row)
        if has_gradient(row, self.config):
            self.num_gradient_steps += 1
            self.no_gradient_rows.clear()
        else:
            self.no_gradient_rows.append(row)
        for score in [score for pair in self.evaluation_scores.values() for score in pair if math.isnan(score.reward)]:
            score.reward = row["reward/mean"]
        accuracy = mean([_accuracy(each) for each in self.newest_rows(5)])
        self.is_solved = accuracy >= SOLVED_ACCURACY and accuracy >= self._first_accuracy + 0.1

    def add_evaluation_row(self, row: Row) -> None:
        """Adds the row of an evaluation of one or several sets."""
        reward = mean([each["reward/mean"] for each in self.newest_rows(TREND_ROWS)]) if self.rows else math.nan
        for name in [name for name in row if name.startswith("eval/") and name.endswith("/pass@1")]:
            score = EvaluationScore(row[name], row[f"{name}_low"], row[f"{name}_high"], reward)
            best, _ = self.evaluation_scores.get(name, (score, score))
            self.evaluation_scores[name] = (score if score.value >= best.value else best, score)

    def newest_rows(self, count: int) -> list[Row]:
        """Returns the last rows, oldest first; fewer at the beginning of a run."""
        return list(islice(reversed(self.rows), count))[::-1]

    def change_of(self, name: str) -> Change | None:
        """Returns the change of a metric; None without the metric or with too few rows."""
        if name not in self._changes:
            before = [row[name] for row in islice(self.rows, TREND_ROWS) if name in row]
            now = [row[name] for row in islice(reversed(self.rows), TREND_ROWS) if name in row]
            self._changes[name] = None
            if len(self.rows) >= 2 * TREND_ROWS and len(before) == len(now) == TREND_ROWS:
                maximum = max(row[name] for row in self.rows if name in row)
                self._changes[name] = Change(mean(before), mean(now), maximum)
        return self._changes[name]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _accuracy(row: Row) -> float:
    accuracy: float = row.get("reward/accuracy", row["reward/mean"])
    return accuracy


def has_gradient(row: Row, config: Config) -> bool:
    """Whether an optimizer step had a gradient from rewards or a teacher.

    A gradient from the KL to the reference alone does not count.
    """
    is_nonzero = 0 < row["grad_norm"] < math.inf
    if config.policy.trains_on_equal_rewards:
        return bool(is_nonzero and row["sample_utilization"] > 0)
    has_equal_rewards = row["reward/zero_variance_groups"] >= 1 and not row.get("reward/overlong_penalty")
    if has_equal_rewards and config.policy.baseline != "none" and config.policy.credit != "turn":
        return False
    has_advantage = row["advantage/std"] > 0 or row["advantage/mean"] != 0
    return bool(has_advantage and is_nonzero)


def explain_missing_gradient(rows: Sequence[Row], config: Config) -> tuple[str, str]:
    """Returns the reasons why these steps had no gradient, and the remedies."""

    def mean_of(name: str) -> float:
        return mean([row.get(name, 0.0) for row in rows])

    causes: list[str] = []
    remedies: list[str] = []
    if mean_of("reward/errors") >= 0.5:
        causes.append(f"{mean_of('reward/errors'):.0%} of the completions could not be scored")
        remedies.append("fix the reward (run=rewards applies it to saved completions)")
    from_rewards = not config.policy.trains_on_equal_rewards
    if from_rewards and mean_of("reward/zero_variance_groups") >= 1:
        reward = mean_of("reward/mean")
        causes.append(f"all {config.optim_batch_groups} groups had equal rewards (mean {reward:.2f})")
    if mean_of("reward/invalid") >= 0.5:
        causes.append(f"{mean_of('reward/invalid'):.0%} of the completions were invalid")
        remedies.append("read the printed samples")
    if mean_of("length/truncated") >= 0.5:
        replies = " with all replies" if config.env.plays_episodes else ""
        limit = f"{config.response_tokens} tokens{replies}"
        causes.append(f"{mean_of('length/truncated'):.0%} of the completions were truncated at {limit}")
        remedies.append("raise env.max_episode_tokens" if replies else "raise inference_model.max_tokens")
    if mean_of("sample_utilization") == 0:
        causes.append("no completion was in the loss")
        if config.policy.filter_range is not None:
            remedies.append(f"widen policy.filter_range={config.policy.filter_range}")
        if config.policy.filter_truncated:
            remedies.append("set policy.filter_truncated=false")
    if not all(math.isfinite(row["grad_norm"]) for row in rows):
        causes.append("gradients were not finite")
        remedies.append("lower optimizer.lr")
    if config.policy.distill_coef != 0 and mean_of("sample_utilization") > 0 and mean_of("kl/teacher") == 0:
        causes.append("the teacher gives every token the same probability as the policy")
        remedies.append(
            "use another teacher (ref_model.name), or a teacher with the reference answer in its prompt (policy=opsd)"
        )
    if from_rewards and any(row["grad_norm"] > 0 for row in rows) and config.policy.kl_coef > 0:
        causes.append("only the KL to the reference had a gradient")
    if from_rewards and mean_of("reward/zero_variance_groups") >= 1 and mean_of("reward/errors") < 0.5:
        if mean([row.get("reward/accuracy", row["reward/mean"]) for row in rows]) >= 1:
            remedies.append("use harder prompts: every completion is right")
        elif "turns/max" in rows[-1] and not any(row["reward/mean"] for row in rows):
            remedies.append(
                "read episodes with run=rollouts: does the environment give rewards, and can it read the turns"
            )
            remedies.append("use easier examples, or rewards for parts of the episode")
        else:
            remedies.append("compare the printed samples with the form that the reward expects")
            remedies.append("use easier prompts, a larger env.repeats, or a reward with more values between 0 and 1")
    cause = ", ".join(causes) or "the gradient was zero"
    return f"{cause[0].upper()}{cause[1:]}", "; ".join(remedies) or "check grad_norm and lr"
