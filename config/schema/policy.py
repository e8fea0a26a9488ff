"""The `policy` section: fields of the training objective, their checks, and the preset loader.

A preset is a YAML file of these fields. `torchgrpo/training/advantage.py` and `loss_terms.py` look up functions by
the values of the fields. `docs/objectives.md` has the formula of every field.
"""

import math
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema import policy_messages as messages
from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.trust_region import TrustRegion
from config.schema.values import check_choice

PRESETS = Path(__file__).parents[1] / "policy"

AGGREGATIONS = (
    "token_mean", "sequence_mean", "sequence_sum", "constant_length", "constant_length_sum", "pass_mean",
    "length_weighted", "padded_mean", "token_sum",
)  # fmt: skip

OBJECTIVES = Registry("policy.objective", "torchgrpo.training.objectives", "TERM")

CHOICES: dict[str, tuple[str, ...]] = {
    "credit": ("completion", "turn"),
    "reward_components": ("combined", "separate"),
    "baseline": ("mean", "leave_one_out", "length_weighted", "second_best", "none"),
    "scale": (
        "std_unbiased", "std_population", "std_leave_one_out", "batch", "mean", "nonzero_share", "none",
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
    "filter_on": ("success", "reward_std", "margin"),
}  # fmt: skip


@dataclass
class PolicyConfig:
    """The training objective; its defaults are the `grpo` preset."""

    name: str = "grpo"
    """Name of the preset, for error messages."""

    credit: str = "completion"
    """Unit that gets an advantage. `completion`: the whole completion, by its reward. `turn`: each turn of the model,
    by the rewards of this turn and the later ones, relative to the group's other completions that came to this turn."""
    reward_components: str = "combined"
    """`combined`: the reward of a completion is its total score. `separate`: each reward component in
    `env.reward_weights` or in the list `env.reward` is centred and scaled separately, and the results are
    summed with their weights."""
    baseline: str = "mean"
    """Baseline that is subtracted from a reward: the `mean` of the group, the mean of the other completions
    (`leave_one_out`), the length-weighted mean (`length_weighted`), or `none`. `second_best`: the best
    completion of a group gets its margin over the second best, all others get 0."""
    scale: str = "std_unbiased"
    """Divisor of the centred reward. The standard deviation of the group with G-1 (`std_unbiased`) or G
    (`std_population`), of the other completions (`std_leave_one_out`), or of the batch (`batch`). Or the
    group's `mean`; a group whose mean is not above 0 gets 0. Or the share of nonzero rewards in the batch
    (`nonzero_share`), or no division (`none`)."""
    epsilon: float = 1e-4
    """Keeps the division by `scale` finite; see `epsilon_rule`."""
    epsilon_rule: str = "add"
    """Divisor with scale s: `add` is s + epsilon, `clamp` is max(s, epsilon)."""
    group_of_one: str = "zero"
    """Advantage in a group with a single valid completion: `zero`, or `raw`, the reward itself."""
    discount: float = 1.0
    """Factor on a token's advantage for each token sampled after it; 1: equal advantages for all tokens."""
    whiten: str = "none"
    """Whitening of the advantages over the whole batch, which centres them and divides by their standard
    deviation: over `rollouts`, over `tokens` (longer responses count more), or `none`."""
    whiten_scale: str = "std_unbiased"
    """Deviation of the whitening, with n-1 (`std_unbiased`) or n (`std_population`); `none`: only centred."""
    whiten_epsilon: float = 1e-8
    """Keeps the division of the whitening finite; see `whiten_epsilon_rule`."""
    whiten_epsilon_rule: str = "inside"
    """Divisor, deviation s: `add` s + epsilon; `clamp` sqrt(max(s^2, epsilon)); `inside` sqrt(s^2 + epsilon)."""

    ratio: str = "token"
    """Unit of the importance ratio. `token`: each token. `sequence`: the geometric mean over a sequence.
    `sequence_token`: the same value, with a gradient through each token's own log-prob. `none`: no ratio;
    `objective=none` is then log-prob times advantage."""
    old_log_prob: str = "engine"
    """Denominator of the ratio: log-probs of the `engine`, or of the `trainer` before the first update."""
    log_ratio_min: float | None = None
    """Lower bound of the log ratio before exponentiation."""
    log_ratio_max: float | None = None
    """Upper bound of the log ratio before exponentiation."""
    ratio_max: float | None = None
    """Upper bound of the unclipped ratio in `objective=clip`, for either sign of the advantage."""

    objective: str = "clip"
    """Policy term. `clip`: minimum of the unclipped and the clipped product. `cispo`: stop-gradient of the
    clipped ratio, times log-prob. `clamp`: only the clipped product. `soft_clip`: a sigmoid gate instead of the
    clip. `geometric`: the geometric mean of tokens that are clipped in log space. `vespo`: log-prob times a
    smooth function of the ratio of the whole sequence. `none`: no clip."""
    clip_epsilon_low: float = 0.2
    """The lower clip bound of the ratio is 1 minus this value."""
    clip_epsilon_high: float = 0.2
    """The upper clip bound of the ratio is 1 plus this value."""
    dual_clip: float | None = None
    """Upper bound of the loss for negative advantages, in units of |advantage|; above 1. Unset: no bound."""
    soft_clip_temperature_positive: float = 1.0
    """Steepness of the sigmoid gate for positive advantages."""
    soft_clip_temperature_negative: float = 1.05
    """Steepness of the sigmoid gate for all other advantages."""

    trust_regions: list[TrustRegion] = field(default_factory=list)
    """Rules that mask tokens or whole responses in the policy term, each {measure, between, level, low, high,
    side}. A token is kept where all rules keep it."""
    masked_in_denominator: bool = True
    """Counts tokens that a trust region or `select_tokens` masks in the denominators of the means; `false`:
    masked tokens are excluded from the loss entirely."""
    select_tokens: str = "none"
    """Selection of tokens in the whole batch. `top_entropy` trains only on the `selected_share` of tokens with
    the highest entropy. `clip_covariance` masks this share of all tokens, among tokens whose covariance of
    log-prob and advantage is inside `covariance_range`. `kl_covariance` penalises the share with the highest
    covariance by `covariance_penalty`. `none` selects no tokens."""
    selected_share: float = 0.2
    """Share of the tokens of a batch that `select_tokens` selects."""
    covariance_range: list[float] = field(default_factory=lambda: [1.0, 5.0])
    """[low, high]: `clip_covariance` selects among tokens with a covariance strictly inside this range."""
    covariance_penalty: float = 1.0
    """Weight of |log ratio| of the tokens that `kl_covariance` selects."""

    aggregation: str = "token_mean"
    """Aggregation of token losses over the global batch. `token_mean` and `token_sum` go over all tokens.
    `sequence_mean` is the mean over sequences of token means, `sequence_sum` the mean over sequences of token sums.
    `constant_length` is `sequence_sum` divided by `constant_length`, `constant_length_sum` is `token_sum` divided
    by it. `pass_mean` is the mean over passes of `pass_size` completions of their token means. `length_weighted` is the
    sum of each completion times its length, divided by all positions. `padded_mean` is the mean over all positions."""
    constant_length: int | None = None
    """Divisor of `constant_length` and `constant_length_sum`. Unset: `inference_model.max_tokens`; for plain
    tensors the width of the batch."""
    pass_size: int | None = None
    """Number of completions in a pass of `aggregation=pass_mean`. Unset: the whole batch is one pass."""
    count_empty: bool = False
    """Counts completions without a token in the loss in the means over sequences."""
    length_epsilon: float = 0.0
    """Added to the token count of a sequence where the token count is a divisor."""
    include_padding: bool = False
    """Includes padding positions in the sums, as one other trainer does: the loss then depends on the padding
    values."""

    reward_coef: float = 1.0
    """Weight of the reward's advantage. 0: rewards are logged but have no gradient."""
    distill_coef: float = 0.0
    """Weight of on-policy distillation: log teacher - log policy of each sampled token is added to the token's
    advantage. The teacher is `ref_model`. 0 needs no teacher."""
    distill_log_prob: str = "old"
    """Log-prob of the policy in the distillation term: the denominator of the ratio (`old`), or that of the
    current weights (`current`)."""
    distill_estimator: str = "k1"
    """Estimator of the KL to the teacher; its negative is added to the advantage. `k1` is the difference of
    log-probs. `k2`, `k3` and `abs` are never negative, so they only lower an advantage."""
    distill_clamp: float | None = None
    """Maximum absolute value of a token's distillation estimate, to limit each token. Unset: no bound."""
    teacher_prompt: str | None = None
    """Replaces the last user message in the teacher's prompt: a text with {prompt}, the message, and {answer},
    the reference answer. Unset: the teacher has the prompt of the policy."""

    kl_coef: float = 0.001
    """Weight of the KL to the reference model; 0 needs no reference model."""
    kl_estimator: str = "k3"
    """KL estimator per token, d = reference - log-prob: `k1` -d, `k2` d^2/2, `k3` exp(d) - d - 1, `abs` |d|."""
    kl_placement: str = "loss"
    """`loss`: the KL is a term of the loss, with its gradient. `reward`: the sum over a response is subtracted
    from its reward before the advantage is computed."""
    kl_importance: str = "none"
    """Factor on the KL to the reference, with its gradient. `none`: no factor. `ratio`: the importance ratio.
    `engine_ratio`: the ratio to the engine. `score`: a ratio of value 1, which adds the score-function
    gradient."""
    kl_aggregation: str = "same"
    """Aggregation of the KL terms: `same`, which is that of `aggregation`, or any of its values."""
    kl_log_ratio_clamp: float | None = None
    """Maximum |d| before the estimator. Unset: no bound."""
    kl_clamp: float | None = None
    """Maximum absolute value of the KL estimate. Unset: no bound."""
    kl_inference_coef: float = 0.0
    """Weight of the KL to the inference policy, with the engine's log-probs instead of the reference's."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is maximised; with an `entropy_target`, the initial weight."""
    entropy_target: float | None = None
    """Target of the mean entropy in nats. A step with a lower entropy raises the weight by `entropy_coef_step`; any
    other step lowers it, to 0 at least. At a higher entropy the weight is not applied. Unset: constant weight."""
    entropy_coef_step: float = 0.005
    """Change of the entropy weight per step."""
    entropy_form: str = "full"
    """`full`: entropy of the whole distribution. `sampled`: -p log p of the sampled token only."""

    environment_coef: float = 0.0
    """Weight of the mean negative log-prob of the environment's tokens in a completion, such as tool results;
    the policy learns to predict them."""

    mismatch: str = "none"
    """Correction of differences between trainer and engine: a weight w = exp(old - engine) on the policy term.
    `none`: no weight. `truncate` limits w to [`mismatch_floor`, `mismatch_cap`]. `mask` sets w to 0 outside
    this range."""
    mismatch_level: str = "token"
    """Unit of w: each `token`, the product over the `sequence`, or its geometric mean (`sequence_mean`)."""
    mismatch_cap: float | None = 2.0
    """Maximum of w. Unset: no bound."""
    mismatch_floor: float = 0.0
    """Minimum of w."""
    mismatch_normalize: bool = False
    """Divides the weights by their mean over tokens (over completions for `mismatch_level=sequence`)."""

    filter_truncated: bool = False
    """Excludes responses that are truncated at the token limit from the loss."""
    treat_max_len_as_truncated: bool = False
    """Counts a response with an end token exactly at the token limit as truncated."""
    overlong_cache: int | None = None
    """Width in tokens of the soft overlong penalty below the token limit. Unset: no penalty."""
    overlong_fraction: float = 0.25
    """Maximum of that width as a share of the token limit."""
    overlong_penalty: float = 1.0
    """Penalty at the token limit, in units of reward."""
    overlong_rule: str = "punish"
    """Reward at the token limit: reduced by the full penalty (`punish`), or zero (`zero_at_limit`)."""

    filter_range: list[float] | None = None
    """[low, high]: trains only on groups whose statistic `filter_on` lies strictly inside this range."""
    filter_on: str = "success"
    """Statistic of a group for `filter_range`: the `success` rate, the population standard deviation of the
    rewards (`reward_std`), or the `margin` of the best reward over the second best."""
    dynamic_batching: bool = False
    """Replaces groups outside `filter_range` by new groups until the batch is full."""
    filter_attempts: int = 10
    """Maximum rounds of replacement for one batch; then the step trains on the groups that are available."""

    def __post_init__(self) -> None:
        for key, known in {**CHOICES, "objective": OBJECTIVES.names}.items():
            check_choice(f"policy.{key}", getattr(self, key), known)
        self._check_numbers()
        self._check_pairs()

    def _check_numbers(self) -> None:
        for key in messages.NON_NEGATIVE_FIELDS:
            if not getattr(self, key) >= 0:
                raise self._field_error(key, "must be 0 or above")
        for key in messages.POSITIVE_FIELDS:
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise self._field_error(key, "must be above 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise self._field_error("dual_clip", "must be above 1, or null")
        if self.ratio_max is not None and self.ratio_max < 1:
            raise self._field_error("ratio_max", "must be at least 1, the ratio of a fresh batch, or null")
        if self.mismatch_cap is not None and self.mismatch_floor > self.mismatch_cap:
            raise self._field_error("mismatch_floor", f"must be at most policy.mismatch_cap={self.mismatch_cap}")
        if len(self.covariance_range) != 2 or not self.covariance_range[0] < self.covariance_range[1]:
            raise self._field_error("covariance_range", "must be [low,high] with low < high")
        if self.selected_share > 1 or self.discount > 1:
            key = "selected_share" if self.selected_share > 1 else "discount"
            raise self._field_error(key, "must be at most 1")
        for key in ("entropy_coef", "reward_coef", "distill_coef"):
            if not math.isfinite(getattr(self, key)):
                raise self._field_error(key, "must be finite")

    def _check_pairs(self) -> None:
        low, high = self.log_ratio_min, self.log_ratio_max
        if (low is not None and low > 0) or (high is not None and high < 0):
            raise self._field_error("log_ratio_min", f"log_ratio_min and log_ratio_max={high} must enclose 0")
        if self.mismatch != "none" and self.old_log_prob == "engine":
            raise self._field_error(
                "mismatch",
                "the mismatch correction needs old log-probs of the trainer, but policy.old_log_prob=engine "
                "takes those of the engine; set policy.old_log_prob=trainer or policy.mismatch=none",
            )
        if self.objective in ("clip", "clamp", "soft_clip", "geometric") and self.ratio == "none":
            raise self._field_error(
                "objective", "the objective needs a ratio, but policy.ratio=none; set policy.objective=none"
            )
        if self.objective == "geometric" and self.ratio != "token":
            raise self._field_error(
                "objective",
                f"the objective clips token by token, but policy.ratio={self.ratio}; set policy.ratio=token",
            )
        engine_is_old = self.old_log_prob == "engine"
        for number, region in enumerate(self.trust_regions):
            region.check(f"policy.trust_regions[{number}] (policy {self.name})", engine_is_old)
        if self.dynamic_batching and self.filter_range is None:
            raise self._field_error(
                "dynamic_batching", "there is no range to filter by; set policy.filter_range=[low,high]"
            )
        bounds = self.filter_range
        if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
            raise self._field_error("filter_range", "must be [low,high] with low < high, or null")
        text, no_reward, has_teacher = self.teacher_prompt, self.reward_coef == 0, self.distill_coef != 0
        no_other_term = self.kl_coef == 0 and self.environment_coef == 0
        missing = [] if text is None else [mark for mark in ("{prompt}", "{answer}") if mark not in text]
        marks = "{prompt} stands for the message, {answer} for the reference answer"
        for is_violated, key, problem in (
            (no_reward and not has_teacher and no_other_term, "reward_coef", messages.NOTHING_TO_LEARN),
            (no_reward and self.filter_range is not None, "filter_range", messages.FILTER_WITHOUT_REWARD),
            (no_reward and self.kl_coef and self.kl_placement == "reward", "kl_placement", messages.KL_WITHOUT_REWARD),
            (has_teacher and self.objective == "geometric", "objective", messages.GEOMETRIC_WITH_TEACHER),
            (self.credit == "turn" and self.objective == "geometric", "objective", messages.GEOMETRIC_WITH_TURNS),
            (missing, "teacher_prompt", f"the text lacks {' and '.join(missing)}; {marks}"),
            (text and self.kl_coef, "kl_coef", messages.KL_WITH_TEACHER_PROMPT),
            (text and not has_teacher, "distill_coef", messages.TEACHER_PROMPT_WITHOUT_TEACHER),
        ):
            if is_violated:
                raise self._field_error(key, problem)

        if self.credit == "turn":
            wrong = {
                key: known[0] for key, known in messages.TURN_CREDIT_FIELDS.items() if getattr(self, key) not in known
            }
            if wrong:
                settings = " ".join(f"policy.{key}={value}" for key, value in wrong.items())
                raise self._field_error(next(iter(wrong)), f"{messages.TURN_CREDIT}; set {settings}")

    def _field_error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"policy.{key}={getattr(self, key)} (policy {self.name}): {problem}")

    @property
    def uses_reference(self) -> bool:
        """Whether the objective uses the log-probs of `ref_model`."""
        return self.kl_coef != 0 or self.distill_coef != 0

    @property
    def scores_reference_first(self) -> bool:
        """Whether the reference scores the whole batch before the first microbatch is trained on."""
        kl_in_reward = self.kl_coef != 0 and self.kl_placement == "reward"
        return kl_in_reward or (self.distill_coef != 0 and self.has_batchwide_weights)

    @property
    def trains_on_equal_rewards(self) -> bool:
        """Whether groups of equal rewards have a gradient."""
        return self.distill_coef != 0 or self.reward_coef == 0

    @property
    def has_batchwide_weights(self) -> bool:
        """Whether the loss weight of a token depends on all tokens of the batch.

        The dependence is on log-probs or entropies at the current weights.
        """
        shrinks_denominator = bool(self.trust_regions) and not self.masked_in_denominator
        return self.select_tokens != "none" or self.mismatch_normalize or shrinks_denominator

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy is, or may become, a term of the loss."""
        return self.entropy_coef != 0 or self.entropy_target is not None


@cache
def _load_preset(path: Path) -> DictConfig:
    """Loads a preset's YAML file, with a cache."""
    merged = OmegaConf.merge(OmegaConf.structured(PolicyConfig), OmegaConf.load(path))
    assert isinstance(merged, DictConfig)
    return merged


def load_policy(name: str, **overrides: Any) -> PolicyConfig:
    """Returns the preset config/policy/NAME.yaml as a dataclass, with fields replaced by `overrides`.

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
                f"policy.{key}={overrides[key]!r}: no such field; choose one of {', '.join(known_fields)}"
            )
    try:
        policy = OmegaConf.to_object(OmegaConf.merge(_load_preset(path), overrides))
    except OmegaConfBaseException as error:
        raise ConfigError(f"policy={name} with {overrides}: {error}") from error
    assert isinstance(policy, PolicyConfig)
    return policy
