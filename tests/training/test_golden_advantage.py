"""Compares presets to recorded advantages and overlong punishments of six systems."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config.schema.policy import PolicyConfig, load_policy
from torchgrpo.training.advantage import group_advantage
from torchgrpo.training.overlong_completions import overlong_reward

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden"
NOT_COVERED = {
    ("coati", "size1"): "records NaN (0 / 0 of an unbiased deviation of one); ours is 0",
    ("MCAdvantage", "size1"): "records NaN (0 / 0 of an unbiased deviation of one); ours is 0",
}

COATI = {
    "GRPO": ("compat_coati_grpo", {}),
    "DAPO": ("compat_coati_dapo", {}),
    "RLOO": ("compat_coati_grpo", {"baseline": "leave_one_out", "scale": "none"}),
    "REINFORCE_PPB": ("compat_coati_grpo", {"scale": "none"}),
}
TRL_SCALE = {"group": "std_unbiased", "batch": "batch", "none": "none"}


def coati(params: dict[str, Any]) -> PolicyConfig:
    preset, overrides = COATI[params["adv"]]
    return load_policy(preset, **overrides)


def verl_grpo(params: dict[str, Any]) -> PolicyConfig:
    scale = "std_unbiased" if params["norm_adv_by_std_in_grpo"] else "none"
    return load_policy("compat_verl", scale=scale, epsilon=params["epsilon"])


MAPPINGS: dict[str, Callable[[dict[str, Any]], PolicyConfig]] = {
    "compute_grpo_outcome_advantage": verl_grpo,
    "compute_rloo_outcome_advantage": lambda params: load_policy("compat_verl", baseline="leave_one_out", scale="none"),
    "calculate_grpo_advantages": lambda params: load_policy("compat_megatron"),
    "grpo_consumer advantages": coati,
    "GRPOTrainer advantages": lambda params: load_policy("compat_trl", scale=TRL_SCALE[params["scale_rewards"]]),
    "chat_rl advantages (per example)": lambda params: load_policy("compat_nanochat"),
    "MCAdvantage._trajectory_advantage formula": lambda params: load_policy("compat_torchrl"),
}


def _undefined_reason(case: dict[str, Any]) -> str | None:
    system = {"grpo_consumer advantages": "coati", "MCAdvantage._trajectory_advantage formula": "MCAdvantage"}
    reason = NOT_COVERED.get((system.get(case["function"], ""), case["rewards_name"]))
    return reason if "NaN" in case["expected"] else None


@pytest.mark.skipif(not GOLDEN.exists(), reason="the recorded cases are not beside this checkout")
def test_every_recorded_advantage() -> None:
    cases = json.loads((GOLDEN / "advantage.json").read_text())["cases"]
    left_out = 0
    for case in cases:
        rewards = torch.tensor(case["rewards"], dtype=torch.float64)
        valid = torch.ones_like(rewards, dtype=torch.bool)
        if str(case["params"].get("num_turns", "")).startswith("first rollout"):
            valid[:, 0] = False
        ours = group_advantage(MAPPINGS[case["function"]](case["params"]), rewards, valid).flatten()
        if reason := _undefined_reason(case):
            print(f"not covered: {case['function']} {case['rewards_name']}: {reason}")
            assert ours.eq(0).all()
            left_out += 1
            continue
        expected = torch.tensor(case["expected"], dtype=torch.float64)
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-300, msg=str(case))
    print(f"{len(cases) - left_out} of {len(cases)} reproduced")
    assert left_out == 2


@pytest.mark.skipif(not GOLDEN.exists(), reason="the recorded cases are not beside this checkout")
def test_every_recorded_overlong_punishment() -> None:
    cases = json.loads((GOLDEN / "length_shaping.json").read_text())["cases"]
    ours = [case for case in cases if case["function"] == "get_soft_overlong_punishment"]
    assert len(ours) == 40
    for case in ours:
        cache, limit = case["params"]["soft_punish_cache"], case["params"]["max_completion_len"]
        policy = load_policy("dapo", overlong_cache=cache or 1, overlong_fraction=1.0 if cache else 0.0)
        length = torch.tensor([case["input"]["length"]])
        penalized_rewards = overlong_reward(policy, torch.zeros(1, dtype=torch.float64), length, limit)
        assert penalized_rewards.item() == pytest.approx(case["output"], rel=1e-12), case
