"""Maps recorded advantages of newer objectives to presets and fields, by system."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config.schema.policy import load_policy
from torchgrpo.training.advantage import batch_advantage

Case = dict[str, Any]
Fields = dict[str, Any]
CENTRED_ONLY: Fields = {"scale": "none"}
POPULATION_WHITENING: Fields = {"whiten_scale": "std_population", "whiten_epsilon_rule": "clamp"}
TRL_SCALE = {"group": "std_unbiased", "batch": "batch", "none": "none"}


def verl_gdpo(params: Case) -> Fields:
    scale = "std_unbiased" if params["norm_adv_by_std_in_grpo"] else "none"
    tokens = {"whiten": "tokens", "whiten_epsilon": 1e-8, "whiten_epsilon_rule": "inside"}
    return {"scale": scale, "epsilon": params["epsilon"], "group_of_one": "raw"} | tokens


def nemo_gdpo(params: Case) -> Fields:
    """Returns the fields of NeMo's GDPO.

    Without `normalize_rewards` the rewards are only centred, within groups and within the batch.
    """
    others = params["use_leave_one_out_baseline"]
    fields: Fields = {"baseline": "leave_one_out" if others else "mean", "epsilon": 1e-6}
    fields["scale"] = "std_leave_one_out" if others else "std_unbiased"
    if not params["normalize_rewards"]:
        fields |= CENTRED_ONLY
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
        "reinforce_baseline": ("reinforce_pp_baseline", POPULATION_WHITENING | {"group_of_one": "zero"} | whitened),
        "reinforce": ("reinforce_pp", POPULATION_WHITENING),
        "dr_grpo": ("dr_grpo", {}),
        "group_norm": ("grpo", {"epsilon": 1e-9}),
        "rloo": ("rloo", {}),
    }[params["estimator"]]


VERL, SKYRL = "verl.trainer.ppo.core_algos.compute_", "skyrl ppo_utils.compute_"
NEMO = "nemo_rl "
PRESETS: dict[str, Callable[[Case], tuple[str, Fields]]] = {
    f"{VERL}reinforce_plus_plus_baseline_outcome_advantage": lambda params: ("reinforce_pp_baseline", {}),
    f"{VERL}reinforce_plus_plus_outcome_advantage": lambda params: ("reinforce_pp", {"discount": params["gamma"]}),
    f"{VERL}grpo_passk_outcome_advantage": lambda params: ("pass_at_k", verl_pass_at_k(params)),
    f"{VERL}opo_outcome_advantage": lambda params: ("grpo", CENTRED_ONLY | {"baseline": "length_weighted"}),
    f"{VERL}gpg_outcome_advantage": lambda params: ("grpo", {"scale": "nonzero_share", "epsilon": 0.0}),
    f"{VERL}rloo_vectorized_outcome_advantage": lambda params: ("rloo", {}),
    f"{VERL}rloo_outcome_advantage": lambda params: ("rloo", {"group_of_one": "raw"}),
    f"{VERL}gdpo_outcome_advantage": lambda params: ("gdpo", verl_gdpo(params)),
    f"{SKYRL}maxrl_advantage": lambda params: ("maxrl", {"epsilon": params["epsilon"], "group_of_one": "raw"}),
    f"{SKYRL}reinforce_plus_plus_outcome_advantage": lambda params: ("reinforce_pp", {"discount": params["gamma"]}),
    "prime_rl.orchestrator.algo.max_rl.MaxRLAlgorithm.score_group": lambda params: ("maxrl", {}),
    "prime_rl.orchestrator.algo.grpo.GRPOAlgorithm.score_group": lambda params: ("grpo", CENTRED_ONLY),
    "trl.GRPOTrainer advantages": lambda params: trl(params),
    f"{NEMO}GDPOAdvantageEstimator.compute_advantage": lambda params: ("gdpo", nemo_gdpo(params)),
    f"{NEMO}GRPOAdvantageEstimator.compute_advantage": lambda params: ("grpo", nemo_grpo(params)),
    f"{NEMO}ReinforcePlusPlusAdvantageEstimator.compute_advantage": lambda params: (
        "reinforce_pp_baseline",
        POPULATION_WHITENING | {"group_of_one": "zero"},
    ),
    "openrlhf RemoteExperienceMaker.compute_advantages_and_returns": openrlhf,
}


def trl(params: Case) -> tuple[str, Fields]:
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        return "gdpo", {}
    return "compat_trl", {"scale": TRL_SCALE[params["scale_rewards"]]}


def newer_advantage(case: Case) -> tuple[Tensor, Tensor] | None:
    """Computes our advantage; returns it with the recorded one.

    Returns None for features of other systems that no field covers.
    """
    if case["params"].get("length_penalty") or "raises" in case:
        return None
    preset, fields = PRESETS[case["function"]](case["params"])
    rewards, valid, components = _rewards(case)
    lengths = torch.ones_like(rewards, dtype=torch.int64)
    if "lengths" in case:
        lengths = _pad_groups(case["lengths"])[0].nan_to_num(1).long()
    mask = torch.arange(int(lengths.max())) < lengths.view(-1, 1)
    ours = batch_advantage(load_policy(preset, **fields), rewards, valid, mask & valid.view(-1, 1), components)
    is_member = valid.flatten()
    if "expected_per_token" in case:
        expected = [float(value) for row in case["expected_per_token"] for value in row]
        return ours.expand_as(mask)[mask & is_member[:, None]], torch.tensor(expected, dtype=torch.float64)
    expected = [float(value) for value in case["expected"]]
    return ours[is_member, 0], torch.tensor(expected, dtype=torch.float64)


def _pad_groups(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Pads groups of unequal size to [P, G]; returns also their mask."""
    width = max(map(len, rows))
    padded_rows = [[*map(float, row), *[float("nan")] * (width - len(row))] for row in rows]
    is_member = [[index < len(row) for index in range(width)] for row in rows]
    return torch.tensor(padded_rows, dtype=torch.float64), torch.tensor(is_member)


def _rewards(case: Case) -> tuple[Tensor, Tensor, list[tuple[float, Tensor]]]:
    """Returns rewards (or the weighted sum of components), member mask, and components."""
    if "components" not in case:
        return *_pad_groups(case["rewards"]), []
    named = {name: _pad_groups(rows)[0] for name, rows in case["components"].items()}
    is_member = _pad_groups(next(iter(case["components"].values())))[1]
    weights = case["params"]["weights"] or [1.0] * len(named)
    components = [(weight, named[name]) for weight, name in zip(weights, sorted(named), strict=False)]
    together = torch.stack([weight * values for weight, values in components]).nansum(dim=0)
    return together, is_member, components
