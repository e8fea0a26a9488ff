"""Looks at every row of metrics as a person would: says once what is worth worrying about, and what helps.

The bounds are those of the table in README.md. Beside them it notices optimizer steps that taught nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise

from config.errors import RunError
from config.schema import Config

Row = Mapping[str, float]
Crossed = Callable[[Sequence[float], Config], bool]
"""Whether the values of one metric in consecutive rows, the newest last, lie beyond its bound."""
LONGEST = 50
"""Rows that are remembered."""
IDLE_STEPS = 5
"""Steps in a row that taught nothing, after which the run says so."""
SOLVED = 0.9
"""Accuracy from which equal rewards and a small entropy are what success looks like."""


@dataclass(frozen=True)
class Bound:
    """One entry of README's column "worry when".

    metrics: names, of which the worry may concern only some; a K stands for any number.
    worry: what README says.
    remedy: what is said beside it.
    rows: rows in a row that must lie beyond the bound.
    lockstep: only the first optimizer step of an iteration in lockstep counts, which is on-policy.
    unless_solved: not where the reward has risen to near its best.
    """

    metrics: tuple[str, ...]
    worry: str
    crossed: Crossed
    remedy: str
    rows: int = 1
    lockstep: bool = False
    unless_solved: bool = False


def above(limit: float) -> Crossed:
    return lambda values, config: min(values) > limit


def below(limit: float) -> Crossed:
    return lambda values, config: max(values) < limit


def outside(low: float, high: float) -> Crossed:
    return lambda values, config: max(values) < low or min(values) > high


def grows(values: Sequence[float], config: Config) -> bool:
    return all(later > earlier for earlier, later in pairwise(values))


def does_not_rise(values: Sequence[float], config: Config) -> bool:
    return _mean(values[-10:]) <= _mean(values[:10])


def near_the_timeout(values: Sequence[float], config: Config) -> bool:
    return min(values) > 0.8 * config.env.reward_timeout_s


def many_replaced(values: Sequence[float], config: Config) -> bool:
    return min(values) > 3 * config.optim_batch_groups


def many_dropped(values: Sequence[float], config: Config) -> bool:
    return values[-1] - values[0] > config.optim_batch_groups * (len(values) - 1) / 4


SMALLER_STEPS = "lower optimizer.lr, train.epochs or train.max_policy_age"
ONE_DTYPE = "use one dtype on both sides (train.mixed_precision, inference_model.dtype), or policy.mismatch"
BOUNDS = (
    Bound(
        ("reward/mean",),
        "it does not rise in 50 steps",
        does_not_rise,
        "see Troubleshooting in README.md: equal rewards, cut answers, the printed samples, then optimizer.lr",
        rows=50,
        unless_solved=True,
    ),
    Bound(
        ("reward/zero_variance_groups",),
        "above 0.8 before the task is solved: too easy or too hard",
        above(0.8),
        "take other prompts, a larger env.repeats, or a reward with more steps between 0 and 1",
        rows=5,
        unless_solved=True,
    ),
    Bound(
        ("reward/errors",),
        "errors above 0",
        above(0.0),
        "mend the reward or the rows: run=rewards shows what each says",
    ),
    Bound(
        ("reward/control_tokens",),
        "above 0.1",
        above(0.1),
        "the model goes on after the end of its turn: check that its end tokens are in generation_config.json",
        rows=3,
    ),
    Bound(
        ("reward/workers_replaced",),
        "the last one grows",
        grows,
        "answers make the reward hang or crash: run=rewards on such answers, env.reward_timeout_s, "
        "env.reward_memory_gib",
        rows=6,
    ),
    Bound(
        ("reward_latency/p99_s",),
        "p99 above 0.8 of `env.reward_timeout_s`",
        near_the_timeout,
        "raise env.reward_timeout_s, or make the reward faster",
        rows=3,
    ),
    Bound(
        ("reward/length",),
        "below -0.1: answers run into the limit",
        below(-0.1),
        "raise inference_model.max_tokens",
        rows=5,
    ),
    Bound(
        ("groups/generated",),
        "above 3 times the batch",
        many_replaced,
        "take prompts of a fitting difficulty, env.difficulty, or a larger env.repeats",
        rows=5,
    ),
    Bound(
        ("kl/ref",),
        "above 2: far from where it began",
        above(2.0),
        "lower optimizer.lr or raise policy.kl_coef",
        rows=5,
    ),
    Bound(("kl/inference",), "above 0.01 in lockstep", above(0.01), ONE_DTYPE, rows=2, lockstep=True),
    Bound(("ratio/mean",), "mean below 0.5 or above 2", outside(0.5, 2.0), SMALLER_STEPS, rows=3),
    Bound(("ess",), "below 0.5", below(0.5), SMALLER_STEPS, rows=3),
    Bound(
        ("mismatch/p99",),
        "p99 above 0.1 in lockstep: the two sides compute different things",
        above(0.1),
        ONE_DTYPE,
        rows=2,
        lockstep=True,
    ),
    Bound(
        ("loss/clip_fraction_low", "loss/clip_fraction_high"), "above 0.2", above(0.2), SMALLER_STEPS, rows=3
    ),
    Bound(
        ("entropy",),
        "below 0.01 before the task is solved: no exploration left",
        below(0.01),
        "lower optimizer.lr, raise policy.entropy_coef or policy.kl_coef",
        rows=5,
        unless_solved=True,
    ),
    Bound(
        ("loss/nonfinite_steps",),
        "above 0",
        above(0.0),
        "lower optimizer.lr, set optimizer.clip_grad_norm; the batches are in the folder nonfinite/",
    ),
    Bound(
        ("length/truncated",),
        "truncated above 0.1",
        above(0.1),
        "raise inference_model.max_tokens, or ask for shorter answers",
        rows=5,
    ),
    Bound(
        ("ess/age_K",), "below 0.5: lower `train.max_policy_age`", below(0.5), "or lower optimizer.lr", rows=3
    ),
    Bound(
        ("groups/dropped_stale",),
        "a quarter of what is trained on is dropped: `train.stale_groups=wait`",
        many_dropped,
        "or raise train.max_policy_age",
        rows=21,
    ),
)


class Watch:
    """Sees the row of every optimizer step of one run."""

    def __init__(self, config: Config, overlapped: bool) -> None:
        self.config = config
        self.lockstep = not overlapped or config.train.max_policy_age == 0
        self.seen = 0
        self.taught = 0
        self._idle: deque[Row] = deque(maxlen=LONGEST)  # the last steps, where they taught nothing
        self._recent: deque[Row] = deque(maxlen=LONGEST)
        self._on_policy: deque[Row] = deque(maxlen=LONGEST)
        self._first_accuracy = 0.0
        self._said: set[str] = set()

    def remember(self, rows: Iterable[Row]) -> None:
        """The rows of the parts of this run before it was resumed: what they gave cause to say has been said."""
        for row in rows:
            self.tell(row)

    def tell(self, row: Row) -> list[str]:
        """What is to be said of the newest row."""
        if not self.seen:
            self._first_accuracy = _accuracy(row)
        self.seen += 1
        self._recent.append(row)
        if self.lockstep and (row["optimizer_step"] - 1) % self.config.optimizer_steps_per_iteration == 0:
            self._on_policy.append(row)
        return [*self._told_of_idle_steps(row), *self._crossed(row)]

    def check(self, optimizer_steps: int) -> None:
        """The end of a run.

        optimizer_steps: of the whole run; where rows of earlier parts are lost, nothing can be said.

        Raises:
            RunError: no step of the run taught anything.
        """
        if self.taught or not self.seen or self.seen < optimizer_steps:
            return
        raise RunError(
            f"nothing was learned: none of {self.seen} optimizer steps had a gradient that came from rewards. "
            f"{explanation(list(self._idle), self.config)}"
        )

    def _told_of_idle_steps(self, row: Row) -> list[str]:
        if teaches(row, self.config):
            self.taught += 1
            self._idle.clear()
            return []
        self._idle.append(row)
        if len(self._idle) != IDLE_STEPS or "idle" in self._said:
            return []
        self._said.add("idle")
        step = int(row["optimizer_step"])
        why = explanation(list(self._idle), self.config)
        return [f"warning: optimizer steps {step - IDLE_STEPS + 1} to {step} taught nothing. {why}"]

    def _crossed(self, row: Row) -> list[str]:
        said = []
        recent, on_policy, solved = list(self._recent), list(self._on_policy), self._solved
        logged = tuple(row)
        for bound in BOUNDS:
            if bound.metrics[0] in self._said or (bound.unless_solved and solved):
                continue
            rows = (on_policy if bound.lockstep else recent)[-bound.rows :]
            if len(rows) < bound.rows or rows[-1] is not row:
                continue
            for name in _names(bound.metrics, logged):
                values = [known[name] for known in rows if name in known]
                if len(values) == bound.rows and bound.crossed(values, self.config):
                    self._said.add(bound.metrics[0])
                    said.append(
                        f"warning: {name} is {values[-1]:.3g} at optimizer step {int(row['optimizer_step'])} "
                        f"({bound.worry}); {bound.remedy}"
                    )
                    break
        return said

    @property
    def _solved(self) -> bool:
        """The last rows are nearly all right, and it was the run that brought them there."""
        accuracy = _mean([_accuracy(row) for row in list(self._recent)[-5:]])
        return accuracy >= SOLVED and accuracy >= self._first_accuracy + 0.1


def teaches(row: Row, config: Config) -> bool:
    """Whether a step had a gradient that came from rewards, and not from the KL to the reference alone."""
    equal = row["reward/zero_variance_groups"] >= 1 and not row.get("reward/length")
    if equal and config.policy.baseline != "none":
        return False
    some = row["advantage/std"] > 0 or row["advantage/mean"] != 0
    return some and 0 < row["grad_norm"] < math.inf


def explanation(rows: Sequence[Row], config: Config) -> str:
    """Why these steps taught nothing, in figures, and what helps."""

    def mean(name: str) -> float:
        return _mean([row.get(name, 0.0) for row in rows])

    found: list[str] = []
    helps: list[str] = []
    if mean("reward/errors") >= 0.5:
        found.append(f"{mean('reward/errors'):.0%} of the answers could not be judged")
        helps.append("mend the reward (run=rewards tries it on saved answers)")
    if mean("reward/zero_variance_groups") >= 1:
        reward = mean("reward/mean")
        found.append(f"all {config.optim_batch_groups} groups had equal rewards (mean {reward:.2f})")
    if mean("reward/invalid") >= 0.5:
        found.append(f"{mean('reward/invalid'):.0%} of the answers were invalid")
        helps.append("see what the model writes in the printed samples")
    if mean("length/truncated") >= 0.5:
        limit = config.inference_model.max_tokens
        found.append(f"{mean('length/truncated'):.0%} of the answers were cut at {limit} tokens")
        helps.append("raise inference_model.max_tokens")
    if mean("sample_utilization") == 0:
        found.append("no answer was in the loss")
        if config.policy.filter_range is not None:
            helps.append(f"widen policy.filter_range={config.policy.filter_range}")
        if config.policy.filter_truncated:
            helps.append("set policy.filter_truncated=false")
    if not all(math.isfinite(row["grad_norm"]) for row in rows):
        found.append("gradients were not finite")
        helps.append("lower optimizer.lr")
    if any(row["grad_norm"] > 0 for row in rows) and config.policy.kl_coef > 0:
        found.append("only the KL to the reference moved the weights")
    if mean("reward/zero_variance_groups") >= 1 and mean("reward/errors") < 0.5:
        if _mean([_accuracy(row) for row in rows]) >= 1:
            helps.append("harder prompts: every answer is right")
        else:
            helps.append("compare the printed samples with what the reward asks for")
            helps.append(
                "take easier prompts, a larger env.repeats, or a reward with more steps between 0 and 1"
            )
    why = ", ".join(found) or "the gradient was zero"
    return f"{why[0].upper()}{why[1:]}. What helps: {'; '.join(helps) or 'look at grad_norm and lr'}"


@cache
def _names(metrics: tuple[str, ...], logged: tuple[str, ...]) -> list[str]:
    """The logged names that these stand for. Rows have one set of names, or a few."""
    patterns = [f"{name[:-1]}*" if name.endswith("_K") else name for name in metrics]
    return [name for name in logged if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _accuracy(row: Row) -> float:
    return row.get("reward/accuracy", row["reward/mean"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
