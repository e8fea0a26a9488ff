"""Soft overlong punishment by the function that the learner calls: recorded values; longer is never better."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config.policy import load_policy
from training.advantage import overlong_reward

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden" / "length_shaping.json"


def punishment(length: int, limit: int, cache: int) -> float:
    policy = load_policy("grpo", overlong_cache=cache, overlong_fraction=1.0, overlong_penalty=1.0)
    rewards = torch.zeros(1, dtype=torch.float64)
    return float(overlong_reward(policy, rewards, torch.tensor([length]), limit))


def test_recorded_values() -> None:
    if not GOLDEN.is_file():
        pytest.skip("no ../shared/golden/length_shaping.json")
    recorded = [case for case in json.loads(GOLDEN.read_text())["cases"] if "length" in case["input"]]
    # A cache of 0, which config refuses, punishes nothing that can be generated.
    cases = [case for case in recorded if case["params"]["soft_punish_cache"]]
    assert cases
    for case in cases:
        limit, cache = case["params"]["max_completion_len"], case["params"]["soft_punish_cache"]
        assert punishment(case["input"]["length"], limit, cache) == pytest.approx(case["output"], abs=1e-12)


@pytest.mark.parametrize(
    ("length", "limit", "cache", "value"),
    [(80, 100, 20, 0.0), (90, 100, 20, -0.5), (100, 100, 20, -1.0), (101, 100, 20, -1.0)],
)
def test_by_hand(length: int, limit: int, cache: int, value: float) -> None:
    assert punishment(length, limit, cache) == value


@given(st.integers(0, 300), st.integers(1, 200), st.data())
def test_longer_is_never_better(length: int, limit: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, limit))
    assert -1.0 <= punishment(length + 1, limit, cache) <= punishment(length, limit, cache) <= 0.0
