"""The `policy` section: the objective as independent fields. A preset is a short YAML file over them.

No preset has code of its own: `torchgrpo/training/advantage.py` and `torchgrpo/training/loss.py` look up small
functions by the values of these fields. `docs/objectives.md` gives every field its formula and every preset its row.
"""

import math
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema import policy_rules as rules
from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.trust_region import TrustRegion

PRESETS = Path(__file__).parents[1] / "policy"

AGGREGATIONS = (
    "token_mean", "sequence_mean", "sequence_sum", "constant_length", "constant_length_sum", "pass_mean",
    "length_weighted", "padded_mean", "token_sum",
)  # fmt: skip

OBJECTIVES = Registry("policy.objective", "torchgrpo.training.objectives", "TERM")

CHOICES: dict[str, tuple[str, ...]] = {
    "reward_parts": ("together", "apart"),
    "baseline": ("mean", "leave_one_out", "length_weighted", "runner_up", "none"),
    "scale": (
        *("std_unbiased", "std_population", "std_leave_one_out"),
        *("batch", "mean", "nonzero_share", "none"),
    ),
    "epsilon_rule": ("add", "clamp"),
    "group_of_one": ("zero", "raw"),
    "whiten": ("none", "rollouts", "tokens"),
    "whiten_scale": ("std_unbiased", "std_population", "none"),
    "whiten_epsilon_rule": ("add", "clamp", "inside"),
    "ratio": ("token", "sequence", "sequence_token", "none"),
    "old_log_prob": ("engine", "trainer"),
    "select_tokens": ("none", "top_entropy", "clip_covariance", "kl_covariance"),
    "aggregation": AGGREGATIONS,
    "distill_log_prob": ("old", "current"),
    "distill_estimator": ("k1", "k2", "k3", "abs"),
    "kl_aggregation": ("same", *AGGREGATIONS),
    "kl_estimator": ("k1", "k2", "k3", "abs"),
    "kl_placement": ("loss", "reward"),
    "kl_importance": ("none", "ratio", "engine_ratio", "score"),
    "entropy_form": ("full", "sampled"),
    "mismatch": ("none", "truncate", "mask"),
    "mismatch_level": ("token", "sequence", "sequence_mean"),
    "overlong_rule": ("punish", "zero_at_limit"),
    "filter_on": ("success", "reward_std", "lead"),
}


@dataclass
class PolicyConfig:
    """The objective. The defaults are the `grpo` preset: DeepSeekMath's GRPO with a token mean."""

    name: str = "grpo"
    """Label of the preset; named in error messages."""

    reward_parts: str = "together"
    """`together`: a completion's score is its reward. `apart`: each part of the reward that `env.reward_weights` or a
    list in `env.reward` names is centred and scaled by itself, and the results are summed with their weights."""
    baseline: str = "mean"
    """Subtracted from a reward: the group's `mean`, the mean of the others (`leave_one_out`), the mean weighted by
    length (`length_weighted`), or `none`. `runner_up`: the group's best gets its lead over the second, all others 0."""
    scale: str = "std_unbiased"
    """The centred reward is divided by: the group's standard deviation with G-1 (`std_unbiased`) or G
    (`std_population`), the unbiased one of the others (`std_leave_one_out`) or of all rewards in the batch (`batch`),
    the group's `mean` (where that is not above 0 the group gets 0), the share of the batch's rewards that are not 0
    (`nonzero_share`), or nothing (`none`)."""
    epsilon: float = 1e-4
    """Keeps that division finite (`epsilon_rule`)."""
    epsilon_rule: str = "add"
    """With s the scale: `add`: divide by s + epsilon. `clamp`: by max(s, epsilon)."""
    group_of_one: str = "zero"
    """Advantage of a group with one valid member: `zero`, or `raw`: its reward, as if mean 0 and std 1."""
    discount: float = 1.0
    """A token's advantage is multiplied by this for every token drawn after it; 1: all tokens get the same."""
    whiten: str = "none"
    """The advantages of the whole batch are centred and divided by their standard deviation: those of its `rollouts`,
    or of its `tokens`, where a long response counts more; or `none`."""
    whiten_scale: str = "std_unbiased"
    """That deviation: with n-1 (`std_unbiased`) or n (`std_population`); `none`: they are centred and not divided."""
    whiten_epsilon: float = 1e-8
    """Keeps that division finite."""
    whiten_epsilon_rule: str = "inside"
    """With s that deviation: `add`: divide by s + epsilon. `clamp`: by sqrt(max(s^2, epsilon)). `inside`: by
    sqrt(s^2 + epsilon)."""

    ratio: str = "token"
    """Unit of the importance ratio: each `token`; the geometric mean over a `sequence`; `sequence_token`, the
    same value whose gradient reaches each token through its own log-prob; `none`: no ratio, so that
    `objective=none` is log-prob times advantage."""
    old_log_prob: str = "engine"
    """Denominator of the ratio: the `engine`'s log-probs, or the `trainer`'s own before the first update."""
    log_ratio_min: float | None = None
    """Lower bound put on log ratio before it is exponentiated."""
    log_ratio_max: float | None = None
    """Upper bound put on log ratio before it is exponentiated."""
    ratio_max: float | None = None
    """Upper bound on the unclipped ratio of `objective=clip`, for either sign of the advantage."""

    objective: str = "clip"
    """`clip`: min of the unclipped and the clipped product. `cispo`: stop-gradient of the clipped ratio times
    log-prob. `clamp`: the clipped product alone. `soft_clip`: a sigmoid gate in place of the clip.
    `geometric`: tokens clipped in log space, then their geometric mean. `vespo`: log-prob times a smooth function of
    the sequence's whole ratio. `none`: no clip."""
    clip_epsilon_low: float = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_epsilon_high: float = 0.2
    """The ratio is clipped above at 1 + this."""
    dual_clip: float | None = None
    """With a negative advantage the loss is at most this times |advantage|; above 1."""
    soft_clip_temperature_positive: float = 1.0
    """Steepness of the sigmoid gate where the advantage is positive."""
    soft_clip_temperature_negative: float = 1.05
    """Steepness of the sigmoid gate elsewhere."""

    trust_regions: list[TrustRegion] = field(default_factory=list)
    """Rules that leave tokens, or whole responses, out of the policy term, each {measure, between, level, low, high,
    side}; a token stays where all of them keep it."""
    count_dropped: bool = True
    """Tokens that a trust region or `select_tokens` leaves out stay in the denominators. `false`: they are out of the
    loss altogether."""
    select_tokens: str = "none"
    """Tokens chosen among all of the batch: `top_entropy` trains only the `selected_share` with the highest entropy;
    `clip_covariance` drops that share of all tokens from those whose covariance of log-prob and advantage is inside
    `covariance_range`; `kl_covariance` penalises the share with the highest one by `covariance_penalty`."""
    selected_share: float = 0.2
    """Share of the batch's tokens that `select_tokens` chooses."""
    covariance_range: list[float] = field(default_factory=lambda: [1.0, 5.0])
    """[low, high]: covariances, strictly inside, from which `clip_covariance` chooses."""
    covariance_penalty: float = 1.0
    """Weight of |log ratio| of the tokens that `kl_covariance` chooses."""

    aggregation: str = "token_mean"
    """From tokens to one number, over the global batch: `token_mean`; `sequence_mean` of token means;
    `sequence_sum`, the mean over sequences of token sums; `constant_length`, that divided by
    `constant_length`; `pass_mean`, the mean over passes of `pass_size` rows of their token means;
    `length_weighted`, each row times its length over all positions; `padded_mean` over all positions;
    `token_sum`; `constant_length_sum`, that divided by `constant_length`."""
    constant_length: int | None = None
    """Divisor of `constant_length` and `constant_length_sum`. Unset: `inference_model.max_tokens`; on plain
    tensors the width of the batch."""
    pass_size: int | None = None
    """Rows in a pass of `aggregation=pass_mean`. Unset: the whole batch is one pass."""
    count_empty: bool = False
    """Rows without a token in the loss count in the means over sequences."""
    length_epsilon: float = 0.0
    """Added to a sequence's token count where it divides."""
    read_padding: bool = False
    """Sum the padding positions too, as one system does: the loss then depends on what padding holds."""

    reward_coef: float = 1.0
    """Weight of the reward's advantage. 0: rewards are measured, and nothing is learned from them."""
    distill_coef: float = 0.0
    """Weight of log teacher - log policy of each drawn token, which is added to its advantage (on-policy distillation);
    the teacher is `ref_model`. 0 needs no teacher."""
    distill_log_prob: str = "old"
    """The policy's log-prob in it: the denominator of the ratio (`old`), or that of the weights of now (`current`)."""
    distill_estimator: str = "k1"
    """The KL to the teacher whose negative is added, as `kl_estimator`: `k1` is that difference; the others are never
    negative and so only ever lower an advantage."""
    distill_clamp: float | None = None
    """That estimate is clamped to [-this, this], so that no token outweighs all others."""
    teacher_prompt: str | None = None
    """What the teacher sees in the place of the last user message: a text with {prompt}, that message, and {answer},
    the reference answer. Unset: the policy's own prompt."""

    kl_coef: float = 0.001
    """Weight of the KL to the reference model; 0 needs no reference model."""
    kl_estimator: str = "k3"
    """Per token, with d = ref - log-prob: `k1` -d, `k2` d^2/2, `k3` exp(d) - d - 1, `abs` |d|."""
    kl_placement: str = "loss"
    """`loss`: a term of the loss, with its gradient. `reward`: the sum over a response is taken off its
    reward before the advantage."""
    kl_importance: str = "none"
    """The KL to the reference is multiplied, with its gradient, by: nothing (`none`), the importance `ratio`, the ratio
    to the engine (`engine_ratio`), or a ratio of value 1, which adds the gradient of the sampling (`score`)."""
    kl_aggregation: str = "same"
    """How the KL terms become one number: as `aggregation` (`same`), or any of its values."""
    kl_log_ratio_clamp: float | None = None
    """|d| is clamped at this before the estimator."""
    kl_clamp: float | None = None
    """The estimate is clamped to [-this, this]."""
    kl_inference_coef: float = 0.0
    """Weight of the KL to the inference policy (the engine's log-probs in place of the reference's)."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is maximised; with an `entropy_target` the one that the run begins with."""
    entropy_target: float | None = None
    """In nats: after a step with a lower mean entropy the weight rises by `entropy_coef_step`, after another it falls,
    to 0 at the least; at a higher entropy it is not applied. Unset: the weight stays."""
    entropy_coef_step: float = 0.005
    """How much the weight of the entropy changes a step."""
    entropy_form: str = "full"
    """`full`: of the distribution over the vocabulary. `sampled`: -p log p of the sampled token alone."""

    environment_coef: float = 0.0
    """Weight of the mean negative log-prob of the tokens that the environment wrote into a completion (tools' results):
    the policy learns to foresee them."""

    mismatch: str = "none"
    """Weight w = exp(old - engine) on the policy term, for a trainer whose numbers differ from the engine's:
    `none`, `truncate` into, `mask` (0 outside [`mismatch_floor`, `mismatch_cap`])."""
    mismatch_level: str = "token"
    """w of each `token`, the product over the `sequence`, or its geometric mean (`sequence_mean`)."""
    mismatch_cap: float | None = 2.0
    """Largest weight; unset: no bound."""
    mismatch_floor: float = 0.0
    """Smallest weight."""
    mismatch_normalize: bool = False
    """The weights are divided by their mean over the batch's tokens (over its rows, for `mismatch_level=sequence`)."""

    filter_truncated: bool = False
    """Responses cut at the token limit are left out of the loss."""
    limit_is_truncated: bool = False
    """A response that ends by itself exactly at the token limit counts as cut."""
    overlong_cache: int | None = None
    """Width in tokens of the soft overlong punishment below the limit; unset: no punishment."""
    overlong_fraction: float = 0.25
    """That width is at most this share of the token limit."""
    overlong_penalty: float = 1.0
    """Punishment at the token limit, in units of reward."""
    overlong_rule: str = "punish"
    """At the limit: the full penalty (`punish`), or a reward of zero (`zero_at_limit`)."""

    filter_range: list[float] | None = None
    """[low, high]: a group is trained on only if its statistic lies strictly inside."""
    filter_on: str = "success"
    """That statistic: the group's `success` rate, the population standard deviation `reward_std`, or the `lead` of its
    best reward over the second."""
    dynamic_batching: bool = False
    """Groups outside `filter_range` are replaced by new ones until the batch is full."""
    filter_attempts: int = 10
    """Rounds of replacement for one batch; after them it trains on what there is."""

    def __post_init__(self) -> None:
        for key, known in {**CHOICES, "objective": OBJECTIVES.names}.items():
            value = getattr(self, key)
            if value not in known:
                raise ConfigError(
                    f"policy.{key}={value!r} (policy {self.name}): choose one of {', '.join(known)}"
                )
        self._check_numbers()
        self._check_pairs()

    def _check_numbers(self) -> None:
        for key in rules.NOT_NEGATIVE:
            if not getattr(self, key) >= 0:
                raise self._wrong(key, "must be 0 or above")
        for key in rules.POSITIVE:
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise self._wrong(key, "must be above 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise self._wrong("dual_clip", "must be above 1, or null")
        if self.ratio_max is not None and self.ratio_max < 1:
            raise self._wrong("ratio_max", "must be at least 1, the ratio of a fresh batch, or null")
        if self.mismatch_cap is not None and self.mismatch_floor > self.mismatch_cap:
            raise self._wrong("mismatch_floor", f"must be at most policy.mismatch_cap={self.mismatch_cap}")
        if len(self.covariance_range) != 2 or not self.covariance_range[0] < self.covariance_range[1]:
            raise self._wrong("covariance_range", "must be [low,high] with low < high")
        if self.selected_share > 1 or self.discount > 1:
            key = "selected_share" if self.selected_share > 1 else "discount"
            raise self._wrong(key, "must be 1 at most")
        for key in ("entropy_coef", "reward_coef", "distill_coef"):
            if not math.isfinite(getattr(self, key)):
                raise self._wrong(key, "must be finite")

    def _check_pairs(self) -> None:
        low, high = self.log_ratio_min, self.log_ratio_max
        if (low is not None and low > 0) or (high is not None and high < 0):
            raise self._wrong("log_ratio_min", f"and log_ratio_max={high} must enclose 0")
        if self.mismatch != "none" and self.old_log_prob == "engine":
            raise self._wrong(
                "mismatch",
                "corrects the trainer's old log-probs towards the engine's, but policy.old_log_prob=engine "
                "already divides by the engine's: set policy.old_log_prob=trainer or policy.mismatch=none",
            )
        if self.objective in ("clip", "clamp", "soft_clip", "geometric") and self.ratio == "none":
            raise self._wrong(
                "objective", "acts on a ratio, but policy.ratio=none: set policy.objective=none"
            )
        if self.objective == "geometric" and self.ratio != "token":
            raise self._wrong("objective", f"clips token by token: set policy.ratio=token, not {self.ratio}")
        engine_is_old = self.old_log_prob == "engine"
        for number, region in enumerate(self.trust_regions):
            region.check(f"policy.trust_regions[{number}] (policy {self.name})", engine_is_old)
        if self.dynamic_batching and self.filter_range is None:
            raise self._wrong("dynamic_batching", "needs policy.filter_range=[low,high]")
        bounds = self.filter_range
        if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
            raise self._wrong("filter_range", "must be [low,high] with low < high, or null")
        text, alone, taught = self.teacher_prompt, self.reward_coef == 0, self.distill_coef != 0
        unread = self.kl_coef == 0 and self.environment_coef == 0
        lacks = [] if text is None else [mark for mark in ("{prompt}", "{answer}") if mark not in text]
        marks = "{prompt} stands for the message, {answer} for the reference answer"
        for holds, key, why in (
            (alone and not taught and unread, "reward_coef", rules.NOTHING_TO_LEARN),
            (alone and self.filter_range is not None, "filter_range", rules.RANGE_OF_NO_REWARD),
            (alone and self.kl_coef and self.kl_placement == "reward", "kl_placement", rules.KL_OF_NO_REWARD),
            (taught and self.objective == "geometric", "objective", rules.NO_MEAN_OF_A_TEACHER),
            (lacks, "teacher_prompt", f"lacks {' and '.join(lacks)}; {marks}"),
            (text and self.kl_coef, "kl_coef", rules.KL_TO_THE_ANSWER),
            (text and not taught, "distill_coef", rules.NO_TEACHER),
        ):
            if holds:
                raise self._wrong(key, why)

    def _wrong(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"policy.{key}={getattr(self, key)} (policy {self.name}): {why}")

    @property
    def uses_reference(self) -> bool:
        """Whether anything reads the log-probs of `ref_model`."""
        return self.kl_coef != 0 or self.distill_coef != 0

    @property
    def scores_reference_first(self) -> bool:
        """Whether the reference scores a batch before its first microbatch is trained on."""
        in_the_reward = self.kl_coef != 0 and self.kl_placement == "reward"
        return in_the_reward or (self.distill_coef != 0 and self.weighs_whole_batches)

    @property
    def teaches_equal_rewards(self) -> bool:
        """Whether groups of equal rewards teach something: with a teacher, or no reward in the advantage."""
        return self.distill_coef != 0 or self.reward_coef == 0

    @property
    def weighs_whole_batches(self) -> bool:
        """Whether what a token counts depends on all tokens of the batch, as the weights of now see them."""
        shrinks = bool(self.trust_regions) and not self.count_dropped
        return self.select_tokens != "none" or self.mismatch_normalize or shrinks

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy is a term of the loss, or may become one."""
        return self.entropy_coef != 0 or self.entropy_target is not None


@cache
def _preset(path: Path) -> DictConfig:
    """A shipped preset as it was when it was first asked for."""
    merged = OmegaConf.merge(OmegaConf.structured(PolicyConfig), OmegaConf.load(path))
    assert isinstance(merged, DictConfig)
    return merged


def load_policy(name: str, **overrides: Any) -> PolicyConfig:
    """The preset config/policy/NAME.yaml as its dataclass, single fields replaced by `overrides`.

    Raises:
        ConfigError: unknown preset or field, a value of the wrong type or out of range.
    """
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.yaml")))
        raise ConfigError(f"policy={name}: no such preset; choose one of {known}")
    known_fields = [field.name for field in fields(PolicyConfig)]
    for key in overrides:
        if key not in known_fields:
            raise ConfigError(
                f"policy.{key}={overrides[key]!r}: no such field; known: {', '.join(known_fields)}"
            )
    try:
        policy = OmegaConf.to_object(OmegaConf.merge(_preset(path), overrides))
    except OmegaConfBaseException as error:
        raise ConfigError(f"policy={name} with {overrides}: {error}") from error
    assert isinstance(policy, PolicyConfig)
    return policy
