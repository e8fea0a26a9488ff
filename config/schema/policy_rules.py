"""Rules of the objective's fields: bounds, and what goes with what."""

NOT_NEGATIVE = (
    "epsilon", "whiten_epsilon", "discount", "clip_epsilon_low", "clip_epsilon_high", "length_epsilon", "kl_coef",
    "kl_inference_coef", "covariance_penalty", "entropy_coef_step", "environment_coef", "reward_coef", "distill_coef",
    "mismatch_floor", "overlong_fraction", "overlong_penalty",
)  # fmt: skip
POSITIVE = (
    "ratio_max", "soft_clip_temperature_positive", "soft_clip_temperature_negative", "selected_share",
    "constant_length", "pass_size", "kl_log_ratio_clamp", "kl_clamp", "distill_clamp", "mismatch_cap",
    "overlong_cache", "filter_attempts",
)  # fmt: skip

NOTHING_TO_LEARN = (
    "with policy.distill_coef=0 and policy.kl_coef=0 there is nothing to learn from: set policy.reward_coef=1, or "
    "policy.distill_coef=1 for a teacher"
)
RANGE_OF_NO_REWARD = (
    "chooses groups by their rewards, but policy.reward_coef=0: set policy.filter_range=null and "
    "policy.dynamic_batching=false"
)
KL_OF_NO_REWARD = "makes the KL a part of the reward, but policy.reward_coef=0: set policy.kl_placement=loss"
NO_MEAN_OF_A_TEACHER = (
    "averages the advantages of a response and clips by their sign, but a teacher's differ from token to token: set "
    "policy.distill_coef=0, or policy.objective=clip"
)
KL_TO_THE_ANSWER = (
    "with policy.teacher_prompt it would hold the policy to a model that sees the answer: set it to 0"
)
NO_TEACHER = (
    "no teacher reads policy.teacher_prompt: set policy.distill_coef=1, or policy.teacher_prompt=null"
)
