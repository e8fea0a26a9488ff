"""Which fields reproduce the recorded advantages of newer objectives, system by system."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config.schema.policy import load_policy
from torchgrpo.training.advantage import batch_advantage

Case = dict[str, Any]
Fields = dict[str, Any]
PLAIN: Fields = {"scale": "none"}
POPULATION: Fields = {"whiten_scale": "std_population", "whiten_epsilon_rule": "clamp"}
TRL_SCALE = {"group": "std_unbiased", "batch": "batch", "none": "none"}


def verl_gdpo(params: Case) -> Fields:
    scale = "std_unbiased" if params["norm_adv_by_std_in_grpo"] else "none"
    tokens = {"whiten": "tokens", "whiten_epsilon": 1e-8, "whiten_epsilon_rule": "inside"}
    return {"scale": scale, "epsilon": params["epsilon"], "group_of_one": "raw"} | tokens


def nemo_gdpo(params: Case) -> Fields:
    """Without `normalize_rewards` the rewards are centred only, in their groups and in the batch."""
    others = params["use_leave_one_out_baseline"]
    fields: Fields = {"baseline": "leave_one_out" if others else "mean", "epsilon": 1e-6}
    fields["scale"] = "std_leave_one_out" if others else "std_unbiased"
    if not params["normalize_rewards"]:
        fields |= PLAIN
    return fields | {"whiten_epsilon": 0.0}


def verl_pass_at_k(params: Case) -> Fields:
    scaled = "std_unbiased" if params["norm_adv_by_std_in_grpo"] else "none"
    return {"scale": scaled, "epsilon": params["epsilon"]}


def nemo_grpo(params: Case) -> Fields:
    others = params["use_leave_one_out_baseline"]
    return {
        "baseline": "leave_one_out" if others else "mean",
        "scale": "std_leave_one_out" if others else "std_unbiased",
        "epsilon": 1e-6,
    }


def openrlhf(params: Case) -> tuple[str, Fields]:
    whitened: Fields = {} if not params["no_std_norm"] else {"whiten_scale": "none"}
    return {
        "reinforce_baseline": ("reinforce_pp_baseline", POPULATION | {"group_of_one": "zero"} | whitened),
        "reinforce": ("reinforce_pp", POPULATION),
        "dr_grpo": ("dr_grpo", {}),
        "group_norm": ("grpo", {"epsilon": 1e-9}),
        "rloo": ("rloo", {}),
    }[params["estimator"]]


VERL, SKYRL = "verl.trainer.ppo.core_algos.compute_", "skyrl ppo_utils.compute_"
NEMO = "nemo_rl "
PRESETS: dict[str, Callable[[Case], tuple[str, Fields]]] = {
    f"{VERL}reinforce_plus_plus_baseline_outcome_advantage": lambda params: ("reinforce_pp_baseline", {}),
    f"{VERL}reinforce_plus_plus_outcome_advantage": lambda params: (
        "reinforce_pp",
        {"discount": params["gamma"]},
    ),
    f"{VERL}grpo_passk_outcome_advantage": lambda params: ("pass_at_k", verl_pass_at_k(params)),
    f"{VERL}opo_outcome_advantage": lambda params: ("grpo", PLAIN | {"baseline": "length_weighted"}),
    f"{VERL}gpg_outcome_advantage": lambda params: ("grpo", {"scale": "nonzero_share", "epsilon": 0.0}),
    f"{VERL}rloo_vectorized_outcome_advantage": lambda params: ("rloo", {}),
    f"{VERL}rloo_outcome_advantage": lambda params: ("rloo", {"group_of_one": "raw"}),
    f"{VERL}gdpo_outcome_advantage": lambda params: ("gdpo", verl_gdpo(params)),
    f"{SKYRL}maxrl_advantage": lambda params: (
        "maxrl",
        {"epsilon": params["epsilon"], "group_of_one": "raw"},
    ),
    f"{SKYRL}reinforce_plus_plus_outcome_advantage": lambda params: (
        "reinforce_pp",
        {"discount": params["gamma"]},
    ),
    "prime_rl.orchestrator.algo.max_rl.MaxRLAlgorithm.score_group": lambda params: ("maxrl", {}),
    "prime_rl.orchestrator.algo.grpo.GRPOAlgorithm.score_group": lambda params: ("grpo", PLAIN),
    "trl.GRPOTrainer advantages": lambda params: trl(params),
    f"{NEMO}GDPOAdvantageEstimator.compute_advantage": lambda params: ("gdpo", nemo_gdpo(params)),
    f"{NEMO}GRPOAdvantageEstimator.compute_advantage": lambda params: ("grpo", nemo_grpo(params)),
    f"{NEMO}ReinforcePlusPlusAdvantageEstimator.compute_advantage": lambda params: (
        "reinforce_pp_baseline",
        POPULATION | {"group_of_one": "zero"},
    ),
    "openrlhf RemoteExperienceMaker.compute_advantages_and_returns": openrlhf,
}


def trl(params: Case) -> tuple[str, Fields]:
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        return "gdpo", {}
    return "compat_trl", {"scale": TRL_SCALE[params["scale_rewards"]]}


def newer_advantage(case: Case) -> tuple[Tensor, Tensor] | None:
    """Ours and the recorded one; None where a system does something that no field does."""
    if case["params"].get("length_penalty") or "raises" in case:
        return None
    preset, fields = PRESETS[case["function"]](case["params"])
    rewards, valid, parts = _rewards(case)
    lengths = torch.ones_like(rewards, dtype=torch.int64)
    if "lengths" in case:
        lengths = _padded(case["lengths"])[0].nan_to_num(1).long()
    mask = torch.arange(int(lengths.max())) < lengths.view(-1, 1)
    ours = batch_advantage(load_policy(preset, **fields), rewards, valid, mask & valid.view(-1, 1), parts)
    there = valid.flatten()
    if "expected_per_token" in case:
        wanted = [float(value) for row in case["expected_per_token"] for value in row]
        return ours.expand_as(mask)[mask & there[:, None]], torch.tensor(wanted, dtype=torch.float64)
    wanted = [float(value) for value in case["expected"]]
    return ours[there, 0], torch.tensor(wanted, dtype=torch.float64)


def _padded(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Groups of unequal size as [P, G], and bool [P, G]: which members there are."""
    width = max(map(len, rows))
    filled = [[*map(float, row), *[float("nan")] * (width - len(row))] for row in rows]
    there = [[place < len(row) for place in range(width)] for row in rows]
    return torch.tensor(filled, dtype=torch.float64), torch.tensor(there)


def _rewards(case: Case) -> tuple[Tensor, Tensor, list[tuple[float, Tensor]]]:
    """The rewards, or the weighted sum of the parts; who is there; the parts."""
    if "components" not in case:
        return *_padded(case["rewards"]), []
    named = {name: _padded(rows)[0] for name, rows in case["components"].items()}
    there = _padded(next(iter(case["components"].values())))[1]
    weights = case["params"]["weights"] or [1.0] * len(named)
    parts = [(weight, named[name]) for weight, name in zip(weights, sorted(named), strict=False)]
    together = torch.stack([weight * values for weight, values in parts]).nansum(dim=0)
    return together, there, parts
