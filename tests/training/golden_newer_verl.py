"""Maps recorded cases of newer verl and prime-rl objectives to presets and fields.

See `golden_newer.py`.
"""

from collections.abc import Callable
from typing import Any

from config.schema.policy import load_policy
from config.schema.trust_region import TrustRegion
from tests.training.golden_mapping import VERL_AGGREGATION, Inputs, LossCall

Params = dict[str, Any]
Mapping = Callable[[Params, Inputs], LossCall]
Fields = dict[str, Any]
NO_KL: Fields = {"kl_coef": 0.0}
STOP_GRADIENT_RATIO: Fields = {"objective": "cispo", "clip_epsilon_low": 1.0}
"""Fields of the loss stop-gradient(ratio) * log-prob; `clip_epsilon_high` is the upper bound of the ratio."""


def region(**rule: Any) -> dict[str, Any]:
    return vars(TrustRegion(**rule))


def loss_call(preset: str, inputs: Inputs, fields: Fields, **more: Any) -> LossCall:
    policy = load_policy(preset, **(NO_KL | fields))
    return LossCall(policy, inputs["mask"].bool(), inputs["adv"][:, None], **more)


def outward(measure: str, params: Params, low: str, high: str) -> Fields:
    rule = region(measure=measure, low=-params[low], high=params[high], side="outward")
    return {"trust_regions": [rule]}


def verl_dppo(measure: str) -> Mapping:
    def mapping(params: Params, inputs: Inputs) -> LossCall:
        fields = STOP_GRADIENT_RATIO | outward(measure, params, "clip_ratio_low", "clip_ratio_high")
        fields |= {"clip_epsilon_high": params["clip_ratio_c"] - 1, "dual_clip": None}
        fields["aggregation"] = VERL_AGGREGATION[params["loss_agg_mode"]]
        return loss_call("compat_verl", inputs, fields)

    return mapping


def verl_sapo(params: Params, inputs: Inputs) -> LossCall:
    fields = {"log_ratio_min": -20.0, "log_ratio_max": 20.0, "old_log_prob": "trainer"}
    taus = {"soft_clip_temperature_positive": params["tau_pos"], "soft_clip_temperature_negative": params["tau_neg"]}
    return loss_call("sapo", inputs, fields | taus | {"length_epsilon": 1e-8})


def verl_gmpo(params: Params, inputs: Inputs) -> LossCall:
    weighted = params["rollout_is_weights"] is not None
    fields = {
        "old_log_prob": "trainer",
        "clip_epsilon_low": params["clip_ratio_low"],
        "clip_epsilon_high": params["clip_ratio_high"],
        "length_epsilon": 1e-8,
        "mismatch": "truncate" if weighted else "none",
    }
    return loss_call("gmpo", inputs, fields)


def verl_clip_cov(params: Params, inputs: Inputs) -> LossCall:
    fields = {
        "old_log_prob": "trainer",
        "selected_share": params["clip_cov_ratio"],
        "covariance_range": [params["clip_cov_lb"], params["clip_cov_ub"]],
        "clip_epsilon_low": params["clip_ratio"],
        "clip_epsilon_high": params["clip_ratio"],
        "aggregation": VERL_AGGREGATION[params["loss_agg_mode"]],
    }
    return loss_call("clip_cov", inputs, fields)


def verl_kl_cov(params: Params, inputs: Inputs) -> LossCall:
    fields = {
        "old_log_prob": "trainer",
        "selected_share": params["kl_cov_ratio"],
        "covariance_penalty": params["ppo_kl_coef"],
        "aggregation": VERL_AGGREGATION[params["loss_agg_mode"]],
    }
    return loss_call("kl_cov", inputs, fields)


def verl_dro(params: Params, inputs: Inputs) -> LossCall:
    """Maps DRO: its k2 penalty to the old policy is our KL to the engine."""
    fields = {"ratio": "none", "objective": "none", "kl_inference_coef": params["dro_beta"]}
    fields |= {"kl_estimator": "k2", "aggregation": VERL_AGGREGATION[params["loss_agg_mode"]]}
    return loss_call("reinforce", inputs, fields, sample="old")


VERL_VANILLA: Fields = {"clip_epsilon_low": 0.2, "clip_epsilon_high": 0.28, "dual_clip": 3.0}


def verl_weights(params: Params, inputs: Inputs) -> LossCall:
    threshold = str(params["rollout_is_threshold"])
    low, _, high = threshold.rpartition("_")
    fields = VERL_VANILLA | {
        "mismatch": "mask" if low else "truncate",
        "mismatch_level": params["rollout_is"],
        "mismatch_floor": float(low or 0),
        "mismatch_cap": float(high),
        "mismatch_normalize": params["rollout_is_batch_normalize"],
        "aggregation": VERL_AGGREGATION[params["loss_agg_mode"]],
    }
    return loss_call("compat_verl", inputs, fields)


def verl_rejection(params: Params, inputs: Inputs) -> LossCall:
    options = params["rollout_rs"].split(",")
    bounds = str(params["rollout_rs_threshold"]).split(",")
    rules = [verl_rule(option, bound) for option, bound in zip(options, bounds, strict=True)]
    aggregation = VERL_AGGREGATION[params["loss_agg_mode"]]
    fields = {"trust_regions": rules, "masked_in_denominator": False, "aggregation": aggregation}
    return loss_call("compat_verl", inputs, VERL_VANILLA | fields)


def verl_rule(option: str, bound: str) -> dict[str, Any]:
    """Maps a rejection rule of verl to a trust region.

    The bounds of k1 are on engine / trainer, the inverse of our ratio; a single bound u means [1/u, u].
    """
    *_, how, measure = option.split("_") if option.startswith("seq") else ["", *option.split("_")]
    level = {"token": "token", "sum": "sum", "mean": "mean", "max": "each"}[how]
    if measure != "k1":
        return region(measure=measure, between="old_engine", level=level, high=float(bound))
    low, _, high = bound.rpartition("_")
    lower = float(low) if low else 1 / float(high)
    return region(between="old_engine", level=level, low=1 / float(high), high=1 / lower)


def prime(rule: Callable[[Params], Fields]) -> Mapping:
    def mapping(params: Params, inputs: Inputs) -> LossCall:
        fields = rule(params) | {"objective": "none"}
        fields |= {"kl_estimator": "k2", "kl_inference_coef": 2 * params["kl_tau"]}
        arguments = loss_call("dppo", inputs, fields)
        arguments.advantage = arguments.advantage * params["adv_tau"]
        return arguments

    return mapping


def ipo(params: Params) -> Fields:
    threshold = params["ipo_threshold"]
    return {"trust_regions": [region(measure="tv", low=-threshold, high=threshold)]}


def prime_dppo(params: Params) -> Fields:
    return outward("tv", params, "dppo_mask_low", "dppo_mask_high")


def prime_echo(params: Params, inputs: Inputs) -> LossCall:
    arguments = prime(prime_dppo)(params, inputs)
    arguments.policy.environment_coef = params["ce_weight"]
    mask = arguments.mask
    last = mask.flip(1).cumsum(1).flip(1) > 0  # no later than the row's last token in the loss
    arguments.environment = last & ~mask
    return arguments


VERL = "verl.trainer.ppo.core_algos."
VERL_AND_PRIME: dict[str, Mapping] = {
    f"{VERL}compute_policy_loss_dppo_tv": verl_dppo("tv"),
    f"{VERL}compute_policy_loss_dppo_kl": verl_dppo("kl"),
    f"{VERL}compute_policy_loss_sapo": verl_sapo,
    f"{VERL}compute_policy_loss_geo_mean": verl_gmpo,
    f"{VERL}compute_policy_loss_clip_cov": verl_clip_cov,
    f"{VERL}compute_policy_loss_kl_cov": verl_kl_cov,
    f"{VERL}compute_policy_loss_dro": verl_dro,
    "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_weights": verl_weights,
    "verl.trainer.ppo.rollout_corr_helper.compute_rollout_rejection_mask": verl_rejection,
    "prime_rl.trainer.rl.loss.default_loss_fn": prime(prime_dppo),
    "prime_rl.trainer.rl.loss.ipo_loss_fn": prime(ipo),
    "prime_rl.trainer.rl.loss.compute_loss": prime_echo,
}
"""Mappings by the first word of a case's `function`."""
