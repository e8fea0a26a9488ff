"""The recorded cases of on-policy distillation as fields of ours; see `golden_newer.py`.

A case's teacher is the reference of the loss (`Call.ref`).
"""

import torch

from tests.training.golden_mapping import VERL_AGGREGATION, Call, Inputs
from tests.training.golden_newer_verl import Fields, Mapping, Params, call, region

TEACHER = "teacher"
PLAIN: Fields = {"objective": "none", "ratio": "none"}
"""-A lp."""


def taught(inputs: Inputs, fields: Fields, reward: torch.Tensor | None = None) -> Call:
    """`policy=opd` with these fields. reward: the advantage beside the teacher's, [N, 1]."""
    made = call("opd", inputs, {"distill_log_prob": "old"} | fields, ref=TEACHER)
    if reward is not None:
        made.advantage = reward
    return made


def prime(params: Params, inputs: Inputs) -> Call:
    """The teacher's log-prob less that of now, on tokens that have not become unlikely.

    Beside it stands (lp - inf)^2.
    """
    fields = {
        "objective": "none",
        "distill_log_prob": "current",
        "trust_regions": [region(measure="tv", low=-0.2)],
    }
    return taught(inputs, fields | {"kl_estimator": "k2", "kl_inference_coef": 2e-3})


def slime(params: Params, inputs: Inputs) -> Call:
    """The teacher's part is added to the reward's; each sample's mean counts alike."""
    fields = {
        "old_log_prob": "trainer",
        "distill_coef": params["opd_kl_coef"],
        "reward_coef": float(params["base_advantage"] == "adv"),
        "clip_epsilon_high": 0.28,
        "aggregation": "sequence_mean",
        "count_empty": True,
    }
    return taught(inputs, fields)


VERL_ESTIMATOR = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
VERL_LIMIT = 10.0
"""To which verl's k3 is clamped, before `loss_max_clamp`."""


def verl(params: Params, inputs: Inputs) -> Call:
    """PPO's clip on minus a KL estimate, or the estimate with its gradient."""
    mode, given = params["loss_mode"], params["loss_max_clamp"]
    estimator = VERL_ESTIMATOR.get(mode, mode)
    limits = [limit for limit in (given, VERL_LIMIT if estimator == "k3" else None) if limit is not None]
    clamp = min(limits, default=None)
    fields: Fields = {"aggregation": VERL_AGGREGATION[params["loss_agg_mode"]]}
    if not params["use_policy_gradient"]:
        fields |= {"distill_coef": 0.0, "kl_coef": 1.0, "kl_estimator": estimator, "kl_clamp": clamp}
        return taught(inputs, fields)
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
    return taught(inputs, fields)


def trl(params: Params, inputs: Inputs) -> Call:
    """Log-prob times the teacher's less the rollout's.

    The weights of IW-OPD, by how much of a response's disagreement lies ahead, are no field: with a gamma above 0 the
    weighted advantage is given as that of a reward.
    """
    itself, gamma = params["rollout"] == "logp itself", params["iw_opd_gamma"]
    if gamma == 0:
        return taught(inputs, PLAIN | {"distill_log_prob": "current" if itself else "old"})
    rollout = inputs["logp" if itself else "inf"]
    gap = torch.where(inputs["mask"].bool(), inputs[TEACHER] - rollout, 0.0)
    sizes = gap.abs()
    share = (sizes.cumsum(1) - sizes) / (sizes.sum(1, keepdim=True) + params["iw_opd_epsilon"])
    weighted = (1 + gamma * (1 - share)) * gap
    return taught(inputs, PLAIN | {"distill_coef": 0.0, "reward_coef": 1.0}, weighted)


def nemo(params: Params, inputs: Inputs) -> Call:
    """Log-prob times the teacher's less the old one, weighed inside IcePop's bounds.

    The weight is trainer against engine.
    """
    floor, cap = params["truncated_importance_sampling"]
    fields: Fields = {
        "old_log_prob": "trainer",
        "mismatch": "mask",
        "mismatch_floor": floor,
        "mismatch_cap": cap,
    }
    return taught(inputs, PLAIN | fields)


TEACHERS: dict[str, Mapping] = {
    "prime_rl.trainer.rl.loss.ref_kl_loss_fn": prime,
    "apply_opd_kl_to_advantages": slime,
    "verl.trainer.distillation.losses": verl,
    "trl.experimental.iw_opd.IWOPDTrainer._compute_iw_opd_loss": trl,
    "OPDAdvantageEstimator": nemo,
}
"""By the first word of a case's `function`."""
