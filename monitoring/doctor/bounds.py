"""Rules on one metric beyond a bound, in several rows where one may be chance.

README.md says the same in its table of metrics, column "worry when".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice, pairwise

from config.schema import Config
from monitoring.doctor.history import History, Row, mean
from monitoring.doctor.rule import Rule, Seen, Severity

Crossed = Callable[[Sequence[float], Config], bool]
"""Whether the values of one metric in consecutive rows, the newest last, lie beyond its bound."""


@dataclass(frozen=True)
class Bound:
    """Looks at some metrics, of which the worry may concern only one.

    when: said beside the figure.
    rows: rows in a row that must lie beyond the bound.
    lockstep: only the first optimizer step of an iteration in lockstep counts, which is on-policy.
    unless_solved: not where the reward has risen to near its best.
    """

    metrics: tuple[str, ...]
    when: str
    crossed: Crossed
    rows: int = 1
    lockstep: bool = False
    unless_solved: bool = False

    def __call__(self, history: History) -> Seen | None:
        if self.unless_solved and history.solved:
            return None
        known = history.on_policy if self.lockstep else history.rows
        if len(known) < self.rows or known[-1] is not history.rows[-1]:
            return None
        newest = known[-1]
        for name in _names(self.metrics, tuple(newest)):
            rows = islice(reversed(known), self.rows)
            values = [row[name] for row in rows if name in row and _says(row, name)][::-1]
            if len(values) == self.rows and self.crossed(values, history.config):
                return Seen(f"{name} is {values[-1]:.3g} at optimizer step {history.step} ({self.when})")
        return None


def _says(row: Row, name: str) -> bool:
    """Whether a metric means something: those of tokens in the loss are 0 where there is none."""
    return row["sample_utilization"] > 0 or not name.startswith(_OF_LOSS)


_OF_LOSS = ("entropy", "ess", "kl/inference", "loss/clip", "mismatch/", "ratio/")


@cache
def _names(metrics: tuple[str, ...], logged: tuple[str, ...]) -> list[str]:
    """The logged names that these stand for. Rows have one set of names, or a few."""
    patterns = [f"{name[:-1]}*" if name.endswith("_K") else name for name in metrics]
    return [name for name in logged if any(fnmatchcase(name, pattern) for pattern in patterns)]


def above(limit: float) -> Crossed:
    return lambda values, config: min(values) > limit


def below(limit: float) -> Crossed:
    return lambda values, config: max(values) < limit


def outside(low: float, high: float) -> Crossed:
    return lambda values, config: max(values) < low or min(values) > high


def where_rewards_teach(crossed: Crossed) -> Crossed:
    """Only where equal rewards teach nothing: no teacher has a word."""
    return lambda values, config: not config.policy.teaches_equal_rewards and crossed(values, config)


def grows(values: Sequence[float], config: Config) -> bool:
    return all(later > earlier for earlier, later in pairwise(values))


def does_not_rise(values: Sequence[float], config: Config) -> bool:
    trained = config.policy.reward_coef != 0
    return trained and mean(values[-10:]) <= mean(values[:10])


def near_the_timeout(values: Sequence[float], config: Config) -> bool:
    return min(values) > 0.8 * config.env.reward_timeout_s


def many_replaced(values: Sequence[float], config: Config) -> bool:
    return min(values) > 3 * config.optim_batch_groups


def many_dropped(values: Sequence[float], config: Config) -> bool:
    return values[-1] - values[0] > config.optim_batch_groups * (len(values) - 1) / 4


def bound(
    name: str,
    severity: Severity,
    metrics: str,
    when: str,
    crossed: Crossed,
    cause: str,
    knob: str,
    rows: int = 1,
    lockstep: bool = False,
    unless_solved: bool = False,
) -> Rule:
    """A rule that a `Bound` looks for. metrics: their names, between blanks."""
    names = tuple(metrics.split())
    look = Bound(names, when, crossed, rows, lockstep, unless_solved)
    return Rule(name, severity, names, when, cause, knob, look)


SMALLER_STEPS = "lower `optimizer.lr`, `train.epochs` or `train.max_policy_age`"
ONE_DTYPE = (
    "use one dtype on both sides (`train.mixed_precision`, `inference_model.dtype`), or `policy.mismatch`"
)
BOUNDS = (
    bound(
        "reward_flat",
        "warning",
        "reward/mean",
        "it does not rise in 50 steps",
        does_not_rise,
        "Equal rewards, cut answers, a reward that asks for something else, or a learning rate that does not fit",
        "look at the printed samples (`logging.sample_frequency`), then at `optimizer.lr`",
        rows=50,
        unless_solved=True,
    ),
    bound(
        "zero_variance",
        "warning",
        "reward/zero_variance_groups",
        "above 0.8 before the task is solved: too easy or too hard",
        where_rewards_teach(above(0.8)),
        "All completions of a group get one reward, so that nothing tells a better one from a worse one",
        "other prompts (`env.difficulty`), a larger `env.repeats`, or a reward with more steps between 0 and 1",
        rows=5,
        unless_solved=True,
    ),
    bound(
        "reward_errors",
        "warning",
        "reward/errors",
        "errors above 0",
        above(0.0),
        "A fault in the reward, or rows that it cannot judge; these completions are left out of everything",
        "mend `env.reward` or the rows: run=rewards shows what each says",
    ),
    bound(
        "control_tokens",
        "warning",
        "reward/control_tokens",
        "above 0.1",
        above(0.1),
        "The model goes on after the end of its turn",
        "check that its end tokens are in the generation_config.json of `model.name`",
        rows=3,
    ),
    bound(
        "workers_replaced",
        "warning",
        "reward/workers_replaced",
        "the last one grows",
        grows,
        "Answers make the reward hang or crash",
        "run=rewards on such answers, `env.reward_timeout_s`, `env.reward_memory_gib`",
        rows=6,
    ),
    bound(
        "slow_rewards",
        "warning",
        "reward_latency/p99_s",
        "p99 above 0.8 of `env.reward_timeout_s`",
        near_the_timeout,
        "The slowest verdicts are about to be given up, and count as invalid answers then",
        "raise `env.reward_timeout_s`, or make the reward faster",
        rows=3,
    ),
    bound(
        "overlong",
        "warning",
        "reward/length",
        "below -0.1: answers run into the limit",
        below(-0.1),
        "`policy.overlong_*` takes more from long answers than most rewards give",
        "raise `inference_model.max_tokens`",
        rows=5,
    ),
    bound(
        "many_replaced",
        "warning",
        "groups/generated",
        "above 3 times the batch",
        many_replaced,
        "Dynamic sampling throws most groups away: prompts are too easy or too hard",
        "prompts of a fitting difficulty (`env.difficulty`), or a larger `env.repeats`",
        rows=5,
    ),
    bound(
        "duplicated_prompts",
        "warning",
        "prompts/repeated",
        "above 0.1: the batch asks the same several times",
        above(0.1),
        "Rows that occur more than once in the data, or fewer prompts than a batch holds",
        "`env.duplicates=first`, more prompts, or a smaller `env.num_envs`",
        rows=5,
    ),
    bound(
        "favoured_prompt",
        "warning",
        "prompts/most_drawn",
        "above 5: one prompt far more often than the rest",
        above(5.0),
        "A row that occurs many times in the data, a small member of a mixture with a large weight, or a curriculum "
        "that prefers few",
        "`env.duplicates=first`, the weights in `env.mixture`, or a larger `env.curriculum.floor`",
        rows=10,
    ),
    bound(
        "duplicated_completions",
        "warning",
        "groups/duplicates",
        "above 0.95 before the task is solved: completions of one group are the same text",
        where_rewards_teach(above(0.95)),
        "The policy is nearly deterministic, or is drawn from as if it were: such a group teaches nothing",
        "raise `inference_model.temperature` or `policy.entropy_coef`, lower `optimizer.lr`",
        rows=5,
        unless_solved=True,
    ),
    bound(
        "kl_far",
        "alarm",
        "kl/ref",
        "above 2: far from where it began",
        above(2.0),
        "Steps are so large that the policy forgets what it could",
        "lower `optimizer.lr` or raise `policy.kl_coef`",
        rows=5,
    ),
    bound(
        "engine_trainer_kl",
        "alarm",
        "kl/inference",
        "above 0.01 in lockstep",
        above(0.01),
        "Engine and trainer give the same tokens other probabilities, so that no batch is on-policy",
        ONE_DTYPE,
        rows=2,
        lockstep=True,
    ),
    bound(
        "ratio_far",
        "warning",
        "ratio/mean",
        "mean below 0.5 or above 2",
        outside(0.5, 2.0),
        "The policy moves far from the one that drew the batch before the batch is done with",
        SMALLER_STEPS,
        rows=3,
    ),
    bound(
        "low_ess",
        "warning",
        "ess",
        "below 0.5",
        below(0.5),
        "A few tokens carry the batch: the policy is far from the one that drew it",
        SMALLER_STEPS,
        rows=3,
    ),
    bound(
        "engine_trainer_gap",
        "warning",
        "mismatch/p99",
        "p99 above 0.1 in lockstep: the two sides compute different things",
        above(0.1),
        "Another dtype, kernel or quantization on one side",
        ONE_DTYPE,
        rows=2,
        lockstep=True,
    ),
    bound(
        "clip_share",
        "warning",
        "loss/clip_fraction_low loss/clip_fraction_high",
        "above 0.2",
        above(0.2),
        "Steps are so large, or the batch so old, that the clip removes much of the gradient",
        SMALLER_STEPS,
        rows=3,
    ),
    bound(
        "entropy_collapse",
        "alarm",
        "entropy",
        "below 0.01 before the task is solved: no exploration left",
        below(0.01),
        "The policy settled on one answer too early: steps too large, or nothing holds entropy up",
        "lower `optimizer.lr`, raise `policy.entropy_coef` or `policy.kl_coef`",
        rows=5,
        unless_solved=True,
    ),
    bound(
        "nonfinite",
        "alarm",
        "loss/nonfinite_steps",
        "above 0",
        above(0.0),
        "A loss or gradient was NaN or infinite; the batches are in the folder nonfinite/",
        "lower `optimizer.lr`, set `optimizer.clip_grad_norm`",
    ),
    bound(
        "truncation",
        "warning",
        "length/truncated",
        "truncated above 0.1",
        above(0.1),
        "Answers are longer than they may be, and are judged without their end",
        "raise `inference_model.max_tokens`, or ask for shorter answers",
        rows=5,
    ),
    bound(
        "low_ess_by_age",
        "warning",
        "ess/age_K",
        "below 0.5: lower `train.max_policy_age`",
        below(0.5),
        "Tokens of this age come from a policy too far away to learn from",
        "lower `train.max_policy_age` or `optimizer.lr`",
        rows=3,
    ),
    bound(
        "stale_drops",
        "warning",
        "groups/dropped_stale",
        "a quarter of what is trained on is dropped: `train.stale_groups=wait`",
        many_dropped,
        "Engines begin more groups than the learner can take before they are too old",
        "`train.stale_groups=wait`, a smaller `env.num_envs`, or a larger `train.max_policy_age`",
        rows=21,
    ),
)
