"""Table of the doctor's rules: name, severity, metrics, bound and rows, likely cause, setting that helps.

docs/metrics.md is made of it. A rule on one metric is a `Bound`, on a metric that moved while others did not rise a
`Trend`; the few that look at more have a function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal, NamedTuple

from config.schema.config import Config
from torchgrpo.monitoring.doctor.history import (
    ENDS,
    IDLE_STEPS,
    RISE,
    Change,
    History,
    Row,
    explanation,
    mean,
)
from torchgrpo.monitoring.metric_table import pattern_of

Severity = Literal["alarm", "warning", "info"]
"""alarm: going on is useless, or does harm. warning: less is learned than could be. info: it costs time alone."""
MOSTLY = 0.7
"""Share of idle time from which a bottleneck is named."""
_OF_LOSS = ("entropy", "ess", "kl/inference", "loss/clip", "mismatch/", "ratio/")
"""Beginnings of metrics of tokens in the loss, which are 0 where there is none."""


class Seen(NamedTuple):
    """A rule's observation, in figures. cause, setting: where this case tells more than the rule does."""

    text: str
    cause: str = ""
    setting: str = ""


@dataclass(frozen=True)
class Bound:
    """A limit that one metric is beyond in each of the newest rows.

    crossed: whether values of consecutive rows, the newest last, lie beyond it.
    on_policy: only the first optimizer step of an iteration in lockstep counts.
    """

    words: str
    crossed: Callable[[Sequence[float], Config], bool]
    rows: int = 1
    on_policy: bool = False

    @property
    def when(self) -> str:
        rows = f" in {self.rows} rows" if self.rows > 1 else ""
        return f"{self.words}{rows}{' in lockstep' if self.on_policy else ''}"

    def look(self, rule: "Rule", history: History) -> Seen | None:
        known = history.on_policy if self.on_policy else history.rows
        if len(known) < self.rows or known[-1] is not history.rows[-1]:
            return None
        newest = [*islice(reversed(known), self.rows)][::-1]
        for name in _logged(rule.metrics, newest[-1]):
            rows = [row for row in newest if row["sample_utilization"] > 0 or not name.startswith(_OF_LOSS)]
            values = [row[name] for row in rows if name in row]
            if len(values) == self.rows and self.crossed(values, history.config):
                return Seen(f"{name} is {values[-1]:.3g}{_at(history)} ({rule.when})")
        return None


@dataclass(frozen=True)
class Trend:
    """A move of a rule's first metric while its others did not rise."""

    when: str
    moved: Callable[[Change], bool]

    def look(self, rule: "Rule", history: History) -> Seen | None:
        first, *others = rule.metrics
        beside = [history.change(name) for name in others]
        if any(change is None or change.rose for change in beside):
            return None
        for name in _logged([first], history.rows[-1]):
            change = history.change(name)
            if change is not None and self.moved(change):
                went = [f"{name} went {change}" for name, change in zip(others, beside, strict=True)]
                told = f" while {' and '.join(went)}" if went else ""
                return Seen(f"{name} went {change}{told}{_at(history)}")
        return None


@dataclass(frozen=True)
class Other:
    """A check that neither a bound nor a trend can express."""

    when: str
    look: Callable[["Rule", History], Seen | None]


class Where(NamedTuple):
    """A condition beside a rule's check."""

    words: str
    holds: Callable[[History], bool]


ALWAYS = Where("", lambda history: True)
UNSOLVED = Where(", before the task is solved", lambda history: not history.solved)
SOLVED = Where(", after the task is solved", lambda history: history.solved)
UNSOLVED_BY_REWARDS = Where(
    ", before the task is solved",
    lambda history: not history.solved and not history.config.policy.teaches_equal_rewards,
)
REWARDED = Where(
    ", before the task is solved",
    lambda history: not history.solved and history.config.policy.reward_coef != 0,
)
BELOW_ZERO = Where(", while rewards are below zero", lambda history: history.rows[-1]["reward/mean"] < 0)


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    metrics: names as in monitoring/metric_table.py. cause: what is likely behind it. setting: what to change, and how.
    """

    name: str
    severity: Severity
    metrics: tuple[str, ...]
    check: Bound | Trend | Other
    cause: str
    setting: str
    where: Where = ALWAYS

    @property
    def when(self) -> str:
        """The condition, in words."""
        return f"{self.check.when}{self.where.words}"

    def look(self, history: History) -> Seen | None:
        """The observation after the newest row, where the rule holds."""
        return self.check.look(self, history) if self.where.holds(history) else None


def _logged(metrics: Sequence[str], row: Row) -> list[str]:
    """Names in a row that a rule's metrics stand for."""
    return [name for name in row if pattern_of(name) in metrics]


def _at(history: History) -> str:
    return f" at optimizer step {history.step}"


def above(limit: float, rows: int = 1, on_policy: bool = False) -> Bound:
    return Bound(f"above {limit:g}", lambda values, config: min(values) > limit, rows, on_policy)


def below(limit: float, rows: int = 1) -> Bound:
    return Bound(f"below {limit:g}", lambda values, config: max(values) < limit, rows)


def _taught_nothing(rule: Rule, history: History) -> Seen | None:
    count = len(history.idle)
    if count < IDLE_STEPS:
        return None
    why, helps = explanation(list(history.idle), history.config)
    return Seen(f"optimizer steps {history.step - count + 1} to {history.step} taught nothing", why, helps)


def _waits(learner: bool, engines: bool) -> Callable[[Rule, History], Seen | None]:
    """Exactly these of the two were idle for most of the time, in an overlapped run."""

    def look(rule: Rule, history: History) -> Seen | None:
        newest = history.newest(ENDS)
        of_engines = [row["idle/engines"] for row in newest if "idle/engines" in row]
        if len(newest) < ENDS or not of_engines:
            return None
        shares = (mean([row["idle/learner"] for row in newest]), mean(of_engines))
        if [share > MOSTLY for share in shares] != [learner, engines]:
            return None
        return Seen(f"idle/learner is {shares[0]:.2f} and idle/engines {shares[1]:.2f}{_at(history)}")

    return look


def _evaluation_falls(rule: Rule, history: History) -> Seen | None:
    for name, (best, newest) in history.scores.items():
        if newest.high < best.low and newest.reward > best.reward + RISE:
            score, reward = Change(best.value, newest.value), Change(best.reward, newest.reward)
            went = f"{name} went {score} since its best evaluation while reward/mean went {reward}"
            return Seen(f"{went}{_at(history)}")
    return None


SMALLER_STEPS = "lower `optimizer.lr`, `train.epochs` or `train.max_policy_age`"
ONE_DTYPE = (
    "use one dtype on both sides (`train.mixed_precision`, `inference_model.dtype`), or `policy.mismatch`"
)
TAUGHT = ("reward/zero_variance_groups", "advantage/std", "grad_norm")
IDLE = ("idle/learner", "idle/engines")
# fmt: off
RULES = (
    Rule("nothing_taught", "alarm", TAUGHT,
         Other(f"{IDLE_STEPS} rows in a row without a gradient from rewards or a teacher", _taught_nothing),
         "All groups had equal rewards, nothing could be judged, or nothing was in the loss: the finding says which",
         "what the finding names: the reward, the prompts, `inference_model.max_tokens`, `policy.filter_range`",
         UNSOLVED),
    Rule("kl_far", "alarm", ("kl/ref",), above(2, rows=5),
         "Steps are so large that the policy forgets what it could",
         "lower `optimizer.lr` or raise `policy.kl_coef`"),
    Rule("engine_trainer_kl", "alarm", ("kl/inference",), above(0.01, rows=2, on_policy=True),
         "Engine and trainer give the same tokens other probabilities, so that no batch is on-policy",
         ONE_DTYPE),
    Rule("entropy_collapse", "alarm", ("entropy",), below(0.01, rows=5),
         "The policy settled on one answer too early: steps too large, or nothing holds entropy up",
         "lower `optimizer.lr`, raise `policy.entropy_coef` or `policy.kl_coef`",
         UNSOLVED),
    Rule("nonfinite", "alarm", ("loss/nonfinite_steps",), above(0),
         "A loss or gradient was NaN or infinite; the batches are in the folder nonfinite/",
         "lower `optimizer.lr`, set `optimizer.clip_grad_norm`"),
    Rule("length_collapse", "alarm", ("length/response_mean", "groups/success"),
         Trend("half of what it was or less, and right answers did not become more",
               lambda length: length.now <= 0.5 * length.before),
         "The reward pays for short answers, or wrong long ones are punished so that giving up early is best",
         "`env.reward`, `env.reward_weights`; lower `optimizer.lr` or raise `policy.kl_coef`"),
    Rule("end_token_vanished", "alarm", ("length/truncated",),
         Trend("from at most 0.5 to 0.95 or more",
               lambda truncated: truncated.before <= 0.5 and truncated.now >= 0.95),
         "The end token was unlearned: the reward pays for what comes after the answer, or cut answers are not judged",
         "`policy.filter_truncated=false`, `policy.overlong_cache`, an `env.reward` that reads the end of the answer"),
    Rule("part_hacked", "alarm", ("reward/PART", "groups/success"),
         Trend("up by a quarter and by 0.1, near its highest, and right answers did not become more",
               lambda part: part.now >= max(part.before + 0.1, 1.25 * part.before, 0.9 * part.most)),
         "The policy is paid for form without substance: that part is easier to get than a right answer",
         "a smaller weight of that part in `env.reward_weights`, or pay for it only where the answer is right",
         UNSOLVED),
    Rule("evaluation_falls", "alarm", ("eval/SET/pass@1", "reward/mean"),
         Other("the 95% interval of pass@1 lies below that of the best evaluation, and the training reward rose since",
               _evaluation_falls),
         "The reward is hacked, or the training prompts are learned by heart",
         "go back to its checkpoint; mend `env.reward`, take more prompts, raise `policy.kl_coef`"),
    Rule("reward_flat", "warning", ("reward/mean",),
         Bound("does not rise", lambda seen, _: mean(seen[-10:]) <= mean(seen[:10]), rows=50),
         "Equal rewards, cut answers, a reward that asks for something else, or a learning rate that does not fit",
         "look at the printed samples (`logging.sample_frequency`), then at `optimizer.lr`",
         REWARDED),
    Rule("zero_variance", "warning", ("reward/zero_variance_groups",), above(0.8, rows=5),
         "All completions of a group get one reward, as prompts are too easy or too hard",
         "other prompts (`env.difficulty`), a larger `env.repeats`, or a reward with more steps between 0 and 1",
         UNSOLVED_BY_REWARDS),
    Rule("reward_errors", "warning", ("reward/errors",), above(0),
         "A fault in the reward, or rows that it cannot judge; these completions are left out of everything",
         "mend `env.reward` or the rows: run=rewards shows what each says"),
    Rule("control_tokens", "warning", ("reward/control_tokens",), above(0.1, rows=3),
         "The model goes on after the end of its turn",
         "check that its end tokens are in the generation_config.json of `model.name`"),
    Rule("workers_replaced", "warning", ("reward/workers_replaced",),
         Bound("grows", lambda seen, _: all(later > earlier for earlier, later in pairwise(seen)), rows=6),
         "Answers make the reward hang or crash",
         "run=rewards on such answers, `env.reward_timeout_s`, `env.reward_memory_gib`"),
    Rule("slow_rewards", "warning", ("reward_latency/p99_s",),
         Bound("above 0.8 of `env.reward_timeout_s`",
               lambda seen, config: min(seen) > 0.8 * config.env.reward_timeout_s, rows=3),
         "The slowest verdicts are about to be given up, and count as invalid answers then",
         "raise `env.reward_timeout_s`, or make the reward faster"),
    Rule("overlong", "warning", ("reward/length",), below(-0.1, rows=5),
         "Answers run into the limit, and `policy.overlong_*` takes more from them than most rewards give",
         "raise `inference_model.max_tokens`"),
    Rule("many_replaced", "warning", ("groups/generated",),
         Bound("above 3 times the batch", lambda seen, config: min(seen) > 3 * config.optim_batch_groups, rows=5),
         "Dynamic sampling throws most groups away: prompts are too easy or too hard",
         "prompts of a fitting difficulty (`env.difficulty`), or a larger `env.repeats`"),
    Rule("duplicated_prompts", "warning", ("prompts/repeated",), above(0.1, rows=5),
         "Rows that occur more than once in the data, or fewer prompts than a batch holds",
         "`env.duplicates=first`, more prompts, or a smaller `env.num_envs`"),
    Rule("favoured_prompt", "warning", ("prompts/most_drawn",), above(5, rows=10),
         "A row that is many times in the data, a small member of a mixture with a large weight, or a curriculum that "
         "prefers few",
         "`env.duplicates=first`, the weights in `env.mixture`, or a larger `env.curriculum.floor`"),
    Rule("duplicated_completions", "warning", ("groups/duplicates",), above(0.95, rows=5),
         "The policy is nearly deterministic, or is drawn from as if it were: such a group teaches nothing",
         "raise `inference_model.temperature` or `policy.entropy_coef`, lower `optimizer.lr`",
         UNSOLVED_BY_REWARDS),
    Rule("ratio_far", "warning", ("ratio/mean",),
         Bound("below 0.5 or above 2", lambda seen, _: max(seen) < 0.5 or min(seen) > 2, rows=3),
         "The policy moves far from the one that drew the batch before the batch is done with",
         SMALLER_STEPS),
    Rule("low_ess", "warning", ("ess", "ess/age_K"), below(0.5, rows=3),
         "A few tokens carry the batch: the policy is far from the one that drew it",
         SMALLER_STEPS),
    Rule("engine_trainer_gap", "warning", ("mismatch/p99",), above(0.1, rows=2, on_policy=True),
         "Another dtype, kernel or quantization on one side",
         ONE_DTYPE),
    Rule("clip_share", "warning", ("loss/clip_fraction_low", "loss/clip_fraction_high"), above(0.2, rows=3),
         "Steps are so large, or the batch so old, that the clip removes much of the gradient",
         SMALLER_STEPS),
    Rule("truncation", "warning", ("length/truncated",), above(0.1, rows=5),
         "Answers are longer than they may be, and are judged without their end",
         "raise `inference_model.max_tokens`, or ask for shorter answers"),
    Rule("stale_drops", "warning", ("groups/dropped_stale",),
         Bound("up by a quarter of what is trained on",
               lambda seen, config: seen[-1] - seen[0] > config.optim_batch_groups * (len(seen) - 1) / 4, rows=21),
         "Engines begin more groups than the learner can take before they are too old",
         "`train.stale_groups=wait`, a smaller `env.num_envs`, or a larger `train.max_policy_age`"),
    Rule("length_growth", "warning", ("length/response_mean", "reward/mean", "groups/success"),
         Trend("half as long again as before, and neither the reward nor the share of right answers rose",
               lambda length: length.now >= 1.5 * length.before),
         "Length by itself moves the loss: long wrong answers are punished less per token, or the reward likes length",
         "`policy.aggregation`, `policy.overlong_cache`, or a smaller `inference_model.max_tokens`"),
    Rule("kl_growth", "warning", ("kl/ref", "reward/mean"),
         Trend("above 0.5 and three times what it was, and the reward did not rise",
               lambda kl: kl.now >= max(0.5, 3 * kl.before)),
         "The policy drifts without learning: noise in the gradient, or a reward that is the same whatever it does",
         "raise `policy.kl_coef`, lower `optimizer.lr`, or a larger `env.num_envs`",
         UNSOLVED),
    Rule("invalid_growth", "warning", ("reward/invalid", "groups/success"),
         Trend("up by 0.1 and twice what it was, and right answers did not become more",
               lambda invalid: invalid.now >= max(invalid.before + 0.1, 2 * invalid.before)),
         "Answers that no judge gets through score no less than wrong ones, or the policy forgets how to end a turn",
         "say the least score of `env.reward` (FUNCTION.min_score = -1.0), lower `optimizer.lr`, raise "
         "`policy.kl_coef`"),
    Rule("invalid_unpunished", "warning", ("reward/invalid_gap",),
         Bound("not above 0", lambda values, config: max(values) <= 1e-6),
         "The reward does not say its least score, so that invalid answers get the lowest that was seen",
         "say it, below that of a wrong answer: FUNCTION.min_score = -4.0 in the module of `env.reward`",
         BELOW_ZERO),
    Rule("repeats_question", "warning", ("groups/repeats_question",), above(0.5, rows=5),
         "The reward finds what it looks for in the question, or the model goes on with it instead of answering",
         "`env.reward`: judge the end of the answer; see what run=rewards gives for the question alone"),
    Rule("nothing_left", "info", TAUGHT, Other(f"{IDLE_STEPS} rows without a gradient", _taught_nothing),
         "Every answer is right: there is nothing left to learn from these prompts",
         "harder prompts, or a shorter `train.total_dialog_turns`",
         SOLVED),
    Rule("idle_learner", "info", IDLE,
         Other(f"the learner of an overlapped run waits for more than {MOSTLY:.0%} of 10 rows", _waits(True, False)),
         "Generation is the bottleneck",
         "more engines (`inference_model.num_devices`), or a larger `env.num_envs`"),
    Rule("idle_engines", "info", IDLE,
         Other(f"the engines of an overlapped run wait for more than {MOSTLY:.0%} of 10 rows", _waits(False, True)),
         "Training is the bottleneck",
         "more devices or threads for the learner (`train_model.num_devices`, `train_model.num_threads`)"),
    Rule("idle_both", "info", IDLE,
         Other(f"both wait for more than {MOSTLY:.0%} of 10 rows", _waits(True, True)),
         "Judging is the bottleneck, or too few groups are in flight",
         "more `env.reward_workers`, a faster reward, or a larger `env.num_envs`"),
)
# fmt: on
"""All rules, alarms first."""
