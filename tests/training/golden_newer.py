"""Maps recorded loss cases of newer objectives to presets and fields, by system.

As in `golden_mapping.py`, nothing is computed here except what the parameters of a case describe.
"""

from collections.abc import Callable

import torch

from tests.training.golden_mapping import Inputs, LossCall
from tests.training.golden_newer_teachers import TEACHERS
from tests.training.golden_newer_verl import (
    STOP_GRADIENT_RATIO,
    VERL_AND_PRIME,
    Fields,
    Mapping,
    Params,
    loss_call,
    outward,
    region,
)

SKYRL_REDUCTION: dict[str | None, Fields] = {
    "token_mean": {},
    "sequence_mean": {"aggregation": "sequence_mean", "count_empty": True},
    "seq_mean_token_sum_norm": {"aggregation": "constant_length", "count_empty": True},
    None: {"aggregation": "token_sum"},
}


def skyrl(preset: str, fields_of: Callable[[Params], Fields]) -> Mapping:
    def mapping(params: Params, inputs: Inputs) -> LossCall:
        reduction = SKYRL_REDUCTION[params["loss_reduction"]]
        return loss_call(preset, inputs, {"old_log_prob": "trainer"} | reduction | fields_of(params))

    return mapping


def skyrl_dppo(params: Params) -> Fields:
    measure = {"binary_tv": "tv", "binary_kl": "kl"}[params["dppo_type"]]
    behaviour = "engine" if params["behaviour"] == "inf" else "trainer"
    return {"old_log_prob": behaviour} | outward(measure, params, "delta_low", "delta_high")


def skyrl_rollout_is(params: Params) -> Fields:
    rule = region(low=1 - params["eps_clip_low"], high=1 + params["eps_clip_high"])
    return STOP_GRADIENT_RATIO | {"clip_epsilon_high": 1e30, "old_log_prob": "engine", "trust_regions": [rule]}


def skyrl_correction(params: Params) -> Fields:
    correction = params["off_policy_correction"]
    fields: Fields = {
        "clip_epsilon_low": params["eps_clip_low"],
        "clip_epsilon_high": params["eps_clip_high"],
        "mismatch": "none",
        "mismatch_floor": 0.0,
    }
    if kind := correction.get("tis_ratio_type"):
        cap = {"token": ("token_tis_ratio_clip_high", 2.0), "sequence": ("sequence_tis_ratio_clip_high", 5.0)}
        name, default = cap[kind]
        weights = {"mismatch_level": kind, "mismatch_cap": correction.get(name, default)}
        fields |= {"mismatch": "truncate"} | weights
    return fields | {"trust_regions": skyrl_regions(correction)}


def skyrl_regions(correction: Params) -> list[Fields]:
    rules = []
    if "token_mask_is_threshold_low" in correction:
        bounds = (correction[f"token_mask_is_threshold_{side}"] for side in ("low", "high"))
        rules.append(("token", *bounds))
    if "outlier_token_is_threshold_low" in correction:
        bounds = (correction[f"outlier_token_is_threshold_{side}"] for side in ("low", "high"))
        rules.append(("each", *bounds))
    metric = correction.get("sequence_mask_metric")
    if metric == "geometric":
        rules.append(("mean", correction.get("geo_mask_low", 0.99), correction.get("geo_mask_high", 1.01)))
    if metric == "product":
        rules.append(("sum", correction.get("product_mask_low", 0.5), correction.get("product_mask_high", 2.0)))
    return [region(between="old_engine", level=level, low=low, high=high) for level, low, high in rules]


def skyrl_sapo(params: Params) -> Fields:
    return {"soft_clip_temperature_positive": params["tau_pos"], "soft_clip_temperature_negative": params["tau_neg"]}


def skyrl_clip_cov(params: Params) -> Fields:
    return {
        "selected_share": params["clip_ratio"],
        "covariance_range": [params["clip_cov_lb"], params["clip_cov_ub"]],
        "clip_epsilon_high": 0.28,
    }


def skyrl_kl_cov(params: Params) -> Fields:
    return {"selected_share": params["kl_cov_frac"], "covariance_penalty": params["ppo_kl_coef"]}


AREAL_MEASURE = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3", "binary_kl": "kl_symmetric"}
AREAL_LEVEL = {"mean": "mean", "sum": "sum", "max": "each", None: "token"}


def areal(preset: str) -> Mapping:
    def mapping(params: Params, inputs: Inputs) -> LossCall:
        rule = params["rejection_sampling"]
        fields: Fields = {
            "old_log_prob": "trainer",
            "clip_epsilon_low": params["eps_clip"],
            "clip_epsilon_high": params["eps_clip_higher"],
            "mismatch": "truncate",
            "mismatch_cap": None,
        }
        if rule.get("action") == "clamp":
            fields |= {"mismatch_cap": rule["upper"], "mismatch_floor": rule.get("lower") or 0.0}
            return loss_call(preset, inputs, fields | {"trust_regions": []})
        level = AREAL_LEVEL[rule.get("agg", "mean") if rule.get("level") == "sequence" else None]
        if level != "token" and rule["metric"] == "ratio":
            fields["mismatch_level"] = "sequence_mean"
        kept_region = region(
            measure=AREAL_MEASURE[rule["metric"]],
            between="engine_old" if rule["metric"] == "kl_k3" else "old_engine",
            level=level,
            low=rule.get("lower"),
            high=rule["upper"],
        )
        return loss_call(preset, inputs, fields | {"trust_regions": [kept_region]})

    return mapping


def areal_cispo(params: Params, inputs: Inputs) -> LossCall:
    arguments = areal("kpop")(params, inputs)
    arguments.policy.objective = "cispo"
    return arguments


def areal_sapo(params: Params, inputs: Inputs) -> LossCall:
    fields = skyrl_sapo(params) | {"old_log_prob": "trainer", "aggregation": "token_mean"}
    arguments = loss_call("sapo", inputs, fields | {"ratio": params["importance_sampling_level"]})
    if params["importance_sampling_level"] == "sequence":  # here AReaL averages the advantage over the row
        arguments.advantage = torch.where(arguments.mask.any(1, keepdim=True), arguments.advantage, 0.0)
    return arguments


OPENRLHF_WEIGHTS: dict[str, Callable[[float, float], Fields]] = {
    "tis": lambda low, high: {"mismatch": "truncate", "mismatch_floor": low, "mismatch_cap": high},
    "icepop": lambda low, high: {"mismatch": "mask", "mismatch_floor": low, "mismatch_cap": high},
    "seq-mask-tis": lambda low, high: {
        "mismatch": "truncate",
        "mismatch_floor": 0.0,
        "mismatch_cap": None,
        "trust_regions": [region(between="old_engine", level="mean", low=low, high=high)],
    },
}


def openrlhf(params: Params, inputs: Inputs) -> LossCall:
    fields = OPENRLHF_WEIGHTS[params["vllm_is_correction_type"]](*params["vllm_is_truncated_threshold"])
    fields |= {"clip_epsilon_low": params["clip_eps_low"], "clip_epsilon_high": params["clip_eps_high"]}
    fields["aggregation"] = "token_mean" if params["token_level_loss"] else "sequence_mean"
    return loss_call("icepop", inputs, fields)


SLIME: Fields = {
    "old_log_prob": "trainer",
    "clip_epsilon_low": 0.2,
    "clip_epsilon_high": 0.28,
    "aggregation": "sequence_mean",
    "count_empty": True,
}


def slime_opsm(params: Params, inputs: Inputs) -> LossCall:
    rule = region(measure="k1", level="mean", high=params["opsm_delta"], side="negative")
    return loss_call("opsm", inputs, SLIME | {"trust_regions": [rule]})


def slime_weights(how: str) -> Mapping:
    def mapping(params: Params, inputs: Inputs) -> LossCall:
        bounds = {"mismatch_floor": params["tis_clip_low"], "mismatch_cap": params["tis_clip"]}
        return loss_call("icepop", inputs, SLIME | {"mismatch": how} | bounds)

    return mapping


def slime_kl(params: Params, inputs: Inputs) -> LossCall:
    kind = params["kl_loss_type"]
    fields = {"kl_estimator": "k3" if kind == "low_var_kl" else kind, "kl_coef": params["kl_loss_coef"]}
    fields["kl_clamp"] = 10.0 if kind == "low_var_kl" else None
    return loss_call("unbiased_kl", inputs, SLIME | fields)


def nemo(params: Params, inputs: Inputs) -> LossCall:
    low, high = params["ratio_clip"]
    by_token = params["token_level_loss"]
    fields: Fields = {"old_log_prob": "trainer", "clip_epsilon_low": low, "clip_epsilon_high": high}
    fields |= {"aggregation": "token_mean" if by_token else "sequence_mean", "length_epsilon": 1e-8}
    fields |= nemo_weights(params) | nemo_kl(params)
    return loss_call("unbiased_kl", inputs, fields)


def nemo_weights(params: Params) -> Fields:
    kind = params.get("truncated_importance_sampling_type")
    if kind is None:
        return {}
    low = params["truncated_importance_sampling_ratio_min"] or 0.0
    fields = OPENRLHF_WEIGHTS[kind](low, params["truncated_importance_sampling_ratio"])
    if params.get("sequence_level_importance_ratios"):
        fields |= {"mismatch_level": "sequence", "ratio": "sequence"}
    return fields


def nemo_kl(params: Params) -> Fields:
    if "reference_policy_kl_penalty" not in params:
        return {"kl_coef": 0.0}
    return {
        "kl_coef": params["reference_policy_kl_penalty"],
        "kl_estimator": params["reference_policy_kl_type"],
        "kl_importance": "engine_ratio" if params["use_on_policy_kl_approximation"] else "score",
        "kl_log_ratio_clamp": 20.0,
        "kl_clamp": 10.0,
    }


TRL_LOSS: dict[str, Fields] = {
    "dapo": {},
    "grpo": {"aggregation": "sequence_mean"},
    "cispo": {"objective": "cispo", "clip_epsilon_low": 1.0},
    "sapo": {"objective": "soft_clip", "aggregation": "sequence_mean"},
    "luspo": {"aggregation": "sequence_sum"},
    "vespo": {"objective": "vespo"},
}


def trl(params: Params, inputs: Inputs) -> LossCall:
    kind = params["loss_type"]
    fields: Fields = {
        "mismatch": "none",
        "clip_epsilon_low": params.get("epsilon_low", 0.2),
        "clip_epsilon_high": params.get("epsilon_high", 0.2),
        "ratio": params.get("importance_sampling_level", "token"),
        "kl_coef": params.get("beta", 0.0),
        "kl_importance": "ratio" if params.get("use_bias_correction_kl") else "none",
    }
    fields |= TRL_LOSS[kind]
    if kind == "cispo":
        fields["clip_epsilon_high"] = params["epsilon_high"] - 1
    if kind == "sapo" and "sapo_temperature_pos" in params:
        fields["soft_clip_temperature_positive"] = params["sapo_temperature_pos"]
        fields["soft_clip_temperature_negative"] = params["sapo_temperature_neg"]
    return loss_call("compat_trl", inputs, fields | trl_weights(params) | trl_masks(params))


def trl_weights(params: Params) -> Fields:
    mode = params.get("vllm_importance_sampling_mode")
    if mode is None:
        return {}
    level, how = mode.split("_")
    return {
        "mismatch": how,
        "mismatch_level": level,
        "mismatch_floor": params.get("vllm_importance_sampling_clip_min") or 0.0,
        "mismatch_cap": params["vllm_importance_sampling_clip_max"],
    }


def trl_masks(params: Params) -> Fields:
    if "top_entropy_quantile" in params:
        return {"select_tokens": "top_entropy", "selected_share": params["top_entropy_quantile"]}
    if "off_policy_mask_threshold" in params:
        between = "now_engine" if params.get("use_vllm") else "now_old"
        limit = params["off_policy_mask_threshold"]
        rule = region(measure="k1", between=between, level="mean", high=limit, side="negative")
        return {"trust_regions": [rule]}
    return {}


def trl_gmpo(params: Params, inputs: Inputs) -> LossCall:
    fields: Fields = {
        "old_log_prob": "trainer",
        "clip_epsilon_low": params["epsilon_low"],
        "clip_epsilon_high": params["epsilon_high"],
        "kl_coef": params["beta"],
    }
    return loss_call(
        "gmpo", inputs, fields | trl_masks(params) | {"masked_in_denominator": "top_entropy_quantile" not in params}
    )


SKYRL = "skyrl.backends.skyrl_train.utils.ppo_utils."
AREAL = "areal.utils.functional.functional."
NEWER: dict[str, Mapping] = (
    VERL_AND_PRIME
    | TEACHERS
    | {
        f"{SKYRL}dppo_policy_loss": skyrl("dppo", skyrl_dppo),
        f"{SKYRL}rollout_is_policy_loss": skyrl(
            "icepop", lambda params: skyrl_rollout_is(params) | {"mismatch": "none"}
        ),
        f"{SKYRL}ppo_policy_loss": skyrl("icepop", skyrl_correction),
        f"{SKYRL}sapo_policy_loss": skyrl("sapo", skyrl_sapo),
        f"{SKYRL}compute_policy_loss_clip_cov": skyrl("clip_cov", skyrl_clip_cov),
        f"{SKYRL}compute_policy_loss_kl_cov": skyrl("kl_cov", skyrl_kl_cov),
        f"{SKYRL}importance_sampling_loss": skyrl("dppo", lambda params: {"trust_regions": []}),
        f"{AREAL}ppo_actor_loss_fn": areal("kpop"),
        f"{AREAL}cispo_loss_fn": areal_cispo,
        f"{AREAL}sapo_loss_fn": areal_sapo,
        "openrlhf.models.loss.PolicyLoss": openrlhf,
        "compute_opsm_mask": slime_opsm,
        "icepop_function": slime_weights("mask"),
        "vanilla_tis_function": slime_weights("truncate"),
        "compute_policy_loss(.2,.28)": slime_kl,
        "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn.__call__": nemo,
        "trl.GRPOTrainer._compute_loss": trl,
        "trl.experimental.gmpo.GMPOTrainer._compute_loss": trl_gmpo,
    }
)
"""Mappings by the first word of a case's `function`."""
