"""Names of non-negative and positive `policy` fields, and texts about contradicting settings."""

NON_NEGATIVE_FIELDS = (
    "epsilon", "whiten_epsilon", "discount", "clip_epsilon_low", "clip_epsilon_high", "length_epsilon", "kl_coef",
    "kl_inference_coef", "covariance_penalty", "entropy_coef_step", "environment_coef", "reward_coef", "distill_coef",
    "mismatch_floor", "overlong_fraction", "overlong_penalty",
)  # fmt: skip
POSITIVE_FIELDS = (
    "ratio_max", "soft_clip_temperature_positive", "soft_clip_temperature_negative", "selected_share",
    "constant_length", "pass_size", "kl_log_ratio_clamp", "kl_clamp", "distill_clamp", "mismatch_cap",
    "overlong_cache", "filter_attempts",
)  # fmt: skip

TURN_CREDIT_FIELDS = {
    "baseline": ("leave_one_out", "none"),
    "scale": ("none",),
    "reward_components": ("combined",),
    "discount": (1,),
    "whiten": ("none", "tokens"),
}
"""Values of fields that `credit=turn` can be combined with."""
TURN_CREDIT = (
    "policy.credit=turn compares the return of a turn with those of the other completions, without a scale for a whole "
    "completion"
)
NOTHING_TO_LEARN = (
    "with policy.distill_coef=0 and policy.kl_coef=0 the objective has no term to train on; set "
    "policy.reward_coef=1, or policy.distill_coef=1 for a teacher"
)
FILTER_WITHOUT_REWARD = (
    "the filter chooses groups by their rewards, but policy.reward_coef=0; set policy.filter_range=null and "
    "policy.dynamic_batching=false"
)
KL_WITHOUT_REWARD = "the KL is subtracted from the reward, but policy.reward_coef=0; set policy.kl_placement=loss"
GEOMETRIC_WITH_TEACHER = (
    "the objective averages the advantages of a response and clips by their sign, but a teacher's "
    "advantages differ from token to token; set policy.distill_coef=0, or policy.objective=clip"
)
GEOMETRIC_WITH_TURNS = (
    "the objective averages the advantages of a response and clips by their sign, but with policy.credit=turn they "
    "differ from turn to turn; set policy.credit=completion, or policy.objective=clip"
)
KL_WITH_TEACHER_PROMPT = (
    "with policy.teacher_prompt the KL penalty would refer to a model that sees the reference answer; set "
    "policy.kl_coef=0"
)
TEACHER_PROMPT_WITHOUT_TEACHER = (
    "no teacher reads policy.teacher_prompt; set policy.distill_coef=1, or policy.teacher_prompt=null"
)
