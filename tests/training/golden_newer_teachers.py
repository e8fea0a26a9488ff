"""Maps recorded cases of on-policy distillation to presets and fields.

See `golden_newer.py`. A case's teacher is the reference of the loss (`LossCall.ref`).
"""

import torch

from tests.training.golden_mapping import VERL_AGGREGATION, Inputs, LossCall
from tests.training.golden_newer_verl import Fields, Mapping, Params, loss_call, region

TEACHER = "teacher"
REINFORCE: Fields = {"objective": "none", "ratio": "none"}
"""Fields of the loss -A * log-prob."""


def distillation_call(inputs: Inputs, fields: Fields, reward: torch.Tensor | None = None) -> LossCall:
    """Returns the loss arguments of `policy=opd` with these fields.

    reward: advantage beside the teacher's, [N, 1].
    """
    arguments = loss_call("opd", inputs, {"distill_log_prob": "old"} | fields, ref=TEACHER)
    if reward is not None:
        arguments.advantage = reward
    return arguments


def prime(params: Params, inputs: Inputs) -> LossCall:
    """Maps prime-rl: advantage is the teacher's log-prob less the current one.

    Tokens that became unlikely are dropped. The loss has another term, (lp - inf)^2.
    """
    fields = {"objective": "none", "distill_log_prob": "current", "trust_regions": [region(measure="tv", low=-0.2)]}
    return distillation_call(inputs, fields | {"kl_estimator": "k2", "kl_inference_coef": 2e-3})


def slime(params: Params, inputs: Inputs) -> LossCall:
    """Maps slime: the teacher's advantage is added to the reward's.

    Each sample's mean has equal weight.
    """
    fields = {
        "old_log_prob": "trainer",
        "distill_coef": params["opd_kl_coef"],
        "reward_coef": float(params["base_advantage"] == "adv"),
        "clip_epsilon_high": 0.28,
        "aggregation": "sequence_mean",
        "count_empty": True,
    }
    return distillation_call(inputs, fields)


VERL_ESTIMATOR = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
VERL_LIMIT = 10.0
"""Clamp of verl's k3, applied before `loss_max_clamp`."""


def verl(params: Params, inputs: Inputs) -> LossCall:
    """Maps verl: PPO's clip on a negative KL estimate, or the estimate with its gradient."""
    mode, given = params["loss_mode"], params["loss_max_clamp"]
    estimator = VERL_ESTIMATOR.get(mode, mode)
    limits = [limit for limit in (given, VERL_LIMIT if estimator == "k3" else None) if limit is not None]
    clamp = min(limits, default=None)
    fields: Fields = {"aggregation": VERL_AGGREGATION[params["loss_agg_mode"]]}
    if not params["use_policy_gradient"]:
        fields |= {"distill_coef": 0.0, "kl_coef": 1.0, "kl_estimator": estimator, "kl_clamp": clamp}
        return distillation_call(inputs, fields)
    low, high = params["clip_ratio"]
    fields |= {
        "old_log_prob": "trainer",
        "clip_epsilon_low": low,
        "clip_epsilon_high": high,
        "dual_clip": 3.0,
        "distill_log_prob": "current",
        "distill_estimator": estimator,
        "distill_clamp": clamp,
    }
    return distillation_call(inputs, fields)


def trl(params: Params, inputs: Inputs) -> LossCall:
    """Maps TRL: log-prob times the teacher's log-prob less the rollout's.

    No field covers the weights of IW-OPD (by the share of a response's disagreement that lies ahead). For a
    gamma above 0 the weighted advantage is therefore passed as that of a reward.
    """
    itself, gamma = params["rollout"] == "logp itself", params["iw_opd_gamma"]
    if gamma == 0:
        return distillation_call(inputs, REINFORCE | {"distill_log_prob": "current" if itself else "old"})
    rollout = inputs["logp" if itself else "inf"]
    gap = torch.where(inputs["mask"].bool(), inputs[TEACHER] - rollout, 0.0)
    sizes = gap.abs()
    share = (sizes.cumsum(1) - sizes) / (sizes.sum(1, keepdim=True) + params["iw_opd_epsilon"])
    weighted = (1 + gamma * (1 - share)) * gap
    return distillation_call(inputs, REINFORCE | {"distill_coef": 0.0, "reward_coef": 1.0}, weighted)


def nemo(params: Params, inputs: Inputs) -> LossCall:
    """Maps NeMo: log-prob times the teacher's less the old one, weighted within IcePop's bounds.

    The weight is the ratio of trainer and engine.
    """
    floor, cap = params["truncated_importance_sampling"]
    fields: Fields = {"old_log_prob": "trainer", "mismatch": "mask", "mismatch_floor": floor, "mismatch_cap": cap}
    return distillation_call(inputs, REINFORCE | fields)


TEACHERS: dict[str, Mapping] = {
    "prime_rl.trainer.rl.loss.ref_kl_loss_fn": prime,
    "apply_opd_kl_to_advantages": slime,
    "verl.trainer.distillation.losses": verl,
    "trl.experimental.iw_opd.IWOPDTrainer._compute_iw_opd_loss": trl,
    "OPDAdvantageEstimator": nemo,
}
"""Mappings by the first word of a case's `function`."""
