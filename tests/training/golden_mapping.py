"""Maps recorded loss cases of other systems to presets and fields of our loss.

Each mapping turns the parameters of a system's own function into the arguments of one call of `total_loss`.
Nothing is computed here except tensors that the parameters of the case describe (a mask without its last row,
the product that was passed to `agg_loss`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig, load_policy
from torchgrpo.training.aggregation import BatchTotals

Inputs = dict[str, Tensor]


@dataclass
class LossCall:
    """Arguments of `total_loss` for one case.

    log_prob, old, sample, ref: names of recorded tensors.
    """

    policy: PolicyConfig
    mask: Tensor
    advantage: Tensor
    totals: BatchTotals | None = None
    log_prob: str = "logp"
    old: str = "old"
    sample: str = "inf"
    ref: str = "ref"
    environment: Tensor | None = None
    expected_loss: Callable[[dict[str, Any]], float] = field(default=lambda expected: float(expected["loss"]))


def tensor_sum(values: Any) -> float:
    """Returns the sum of a recorded tensor or scalar."""
    return float(torch.tensor(values, dtype=torch.float64).sum())


def _expected_sum(expected: dict[str, Any]) -> float:
    return tensor_sum(expected["loss"])


def _full_mask(inputs: Inputs) -> Tensor:
    return torch.ones_like(inputs["mask"], dtype=torch.bool)


def coati(params: dict[str, Any], inputs: Inputs) -> LossCall:
    mask = inputs["mask"].bool()
    if params["loss_mask"] == "ones except last row 0":
        mask = mask.clone()
        mask[-1] = False
    preset = {"sample_level": "compat_coati_grpo", "token_level": "compat_coati_dapo"}[params["loss_variation"]]
    policy = load_policy(
        preset,
        kl_coef=params["beta"],
        clip_epsilon_low=params["clip_eps_low"],
        clip_epsilon_high=params["clip_eps_high"],
    )
    return LossCall(policy, mask, inputs["adv"][:, None], sample="old")


def coati_legacy(params: dict[str, Any], inputs: Inputs) -> LossCall:
    policy = load_policy(
        "compat_coati_grpo",
        kl_coef=0.0,
        clip_epsilon_low=params["clip_eps"],
        clip_epsilon_high=params["clip_eps"],
        ratio_max=10.0,
    )
    return LossCall(policy, inputs["mask"].bool(), inputs["adv"][:, None], sample="old")


def megatron(params: dict[str, Any], inputs: Inputs) -> LossCall:
    policy = load_policy(
        "compat_megatron",
        clip_epsilon_low=params["clamp_eps_lower"],
        clip_epsilon_high=params["clamp_eps_upper"],
        kl_coef=params["kl_beta"],
        entropy_coef=params["entropy_weight"],
        mismatch="truncate" if params["inference_logprobs"] else "none",
        mismatch_cap=params["is_truncation_coef"],
        aggregation="token_sum",
    )
    return LossCall(policy, _full_mask(inputs), inputs["adv"][:, None], expected_loss=_expected_sum)


def nanochat(params: dict[str, Any], inputs: Inputs) -> LossCall:
    policy = load_policy("compat_nanochat")
    mask = inputs["mask"].bool()
    totals = BatchTotals.from_mask(policy, mask)
    totals = replace(totals, passes=params["num_passes"] * params["examples_per_rank"])
    return LossCall(policy, mask, inputs["adv"][:, None], totals)


VERL_AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant_length_sum",
}


def verl(loss: str) -> Callable[[dict[str, Any], Inputs], LossCall]:
    per_sequence = {"aggregation": "sequence_mean"}
    fields: dict[str, dict[str, Any]] = {
        "vanilla": {},
        "gspo": {
            "ratio": "sequence_token",
            "log_ratio_min": None,
            "log_ratio_max": 10.0,
            "dual_clip": None,
            **per_sequence,
        },
        "cispo": {"objective": "cispo", "dual_clip": None},
        "sapo": {"objective": "soft_clip", **per_sequence},
        "gpg": {"objective": "none", "ratio": "none"},
        "geo_mean": {"objective": "geometric", "count_empty": True, **per_sequence},
    }

    def mapping(params: dict[str, Any], inputs: Inputs) -> LossCall:
        weighted = params["rollout_is_weights"] is not None
        overrides: dict[str, Any] = {
            "kl_coef": 0.0,
            "clip_epsilon_low": params["clip_ratio_low"],
            "clip_epsilon_high": params["clip_ratio_high"],
            "dual_clip": params["clip_ratio_c"],
            "soft_clip_temperature_positive": params["tau_pos"],
            "soft_clip_temperature_negative": params["tau_neg"],
            "aggregation": VERL_AGGREGATION[params["loss_agg_mode"]],
            "mismatch": "truncate" if weighted else "none",
            "mismatch_cap": 2.0,
        }
        policy = load_policy("compat_verl", **(overrides | fields[loss]))
        return LossCall(policy, inputs["mask"].bool(), inputs["adv"][:, None])

    return mapping


def verl_aggregation(params: dict[str, Any], inputs: Inputs) -> LossCall:
    policy = load_policy(
        "compat_verl",
        kl_coef=0.0,
        objective="none",
        ratio="none",
        aggregation=VERL_AGGREGATION[params["loss_agg_mode"]],
    )
    return LossCall(policy, inputs["mask"].bool(), -inputs["old"])


VERL_KL = {
    "kl": {"kl_estimator": "k1", "kl_log_ratio_clamp": None, "kl_clamp": None},
    "abs": {"kl_estimator": "abs", "kl_log_ratio_clamp": None, "kl_clamp": None},
    "mse": {"kl_estimator": "k2", "kl_log_ratio_clamp": None, "kl_clamp": None},
    "low_var_kl": {"kl_estimator": "k3"},
}


def verl_kl(params: dict[str, Any], inputs: Inputs) -> LossCall:
    policy = load_policy("compat_verl", kl_coef=1.0, aggregation="token_sum", **VERL_KL[params["kl_penalty"]])
    nothing = torch.zeros_like(inputs["adv"])[:, None]
    return LossCall(policy, _full_mask(inputs), nothing, expected_loss=_expected_sum)


def trl(params: dict[str, Any], inputs: Inputs) -> LossCall:
    high = params["epsilon_high"]
    cispo = {"objective": "cispo", "clip_epsilon_low": 1.0, "clip_epsilon_high": high - 1}
    by_type: dict[str, dict[str, Any]] = {
        "grpo": {"aggregation": "sequence_mean"},
        "bnpo": {},
        "dapo": {},
        "dr_grpo": {"aggregation": "constant_length", "constant_length": params["max_completion_length"]},
        "cispo": cispo,
        "sapo": {"objective": "soft_clip", "aggregation": "sequence_mean"},
        "luspo": {"aggregation": "length_weighted", "include_padding": True},
    }
    overrides = {
        "mismatch": "none",
        "kl_coef": params["beta"],
        "clip_epsilon_low": params["epsilon_low"],
        "clip_epsilon_high": high,
        "ratio": params["importance_sampling_level"],
        "ratio_max": params["delta"],
    }
    policy = load_policy("compat_trl", **(overrides | by_type[params["loss_type"]]))
    return LossCall(policy, inputs["mask"].bool(), inputs["adv"][:, None])


TORCHRL_AGGREGATION = {"token_mean": "token_mean", "prompt_mean": "sequence_mean", "none": "token_sum"}


def torchrl(objective: str) -> Callable[[dict[str, Any], Inputs], LossCall]:
    def mapping(params: dict[str, Any], inputs: Inputs) -> LossCall:
        low, high = params["clip_epsilon"]
        policy = load_policy(
            "compat_torchrl",
            objective=objective,
            clip_epsilon_low=low,
            clip_epsilon_high=high,
            aggregation=TORCHRL_AGGREGATION[params["aggregation"]],
            kl_inference_coef=0.0,
            entropy_coef=0.0,
        )
        return LossCall(
            policy, inputs["mask"].bool(), inputs["adv"][:, None], sample="old", expected_loss=_expected_sum
        )

    return mapping


MAPPINGS: dict[str, Callable[[dict[str, Any], Inputs], LossCall]] = {
    "coati.distributed.loss.PolicyLoss.forward": coati,
    "coati.models.loss.PolicyLoss.forward": coati_legacy,
    "megatron.rl.rl_utils.calculate_grpo_loss": megatron,
    "scripts/chat_rl.py": nanochat,
    **{
        f"verl.trainer.ppo.core_algos.compute_policy_loss_{loss}": verl(loss)
        for loss in ("vanilla", "gspo", "cispo", "sapo", "gpg", "geo_mean")
    },
    "verl.trainer.ppo.core_algos.agg_loss": verl_aggregation,
    "verl.trainer.ppo.core_algos.kl_penalty_forward": verl_kl,
    "trl.GRPOTrainer._compute_loss": trl,
    "torchrl.objectives.llm.GRPOLoss": torchrl("clip"),
    "torchrl.objectives.llm.CISPOLoss": torchrl("clamp"),
}
"""Mappings by the first word of a case's `function`."""
