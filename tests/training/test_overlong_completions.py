"""Tests of the length penalty and the filter of truncated completions."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config.schema.policy import PolicyConfig, load_policy
from torchgrpo.training.overlong_completions import overlong_reward, rows_in_loss

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden" / "length_shaping.json"


def punishment(length: int, limit: int, cache: int) -> float:
    policy = load_policy("grpo", overlong_cache=cache, overlong_fraction=1.0, overlong_penalty=1.0)
    rewards = torch.zeros(1, dtype=torch.float64)
    return float(overlong_reward(policy, rewards, torch.tensor([length]), limit))


def test_recorded_values() -> None:
    if not GOLDEN.is_file():
        pytest.skip("no ../shared/golden/length_shaping.json")
    recorded = [case for case in json.loads(GOLDEN.read_text())["cases"] if "length" in case["input"]]
    # A cache of 0, which the config rejects, punishes no possible length.
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


def test_overlong_punishment() -> None:
    lengths = torch.tensor([0, 79, 80, 81, 90, 99, 100])
    rewards = torch.ones(7)
    dapo = PolicyConfig(overlong_cache=20)
    assert overlong_reward(dapo, rewards, lengths, 100).tolist() == pytest.approx(
        [1, 1, 1, 0.95, 0.5, 0.05, 0.0], abs=1e-6
    )
    coati = PolicyConfig(overlong_cache=25, overlong_penalty=10.0, overlong_rule="zero_at_limit")
    right = overlong_reward(coati, torch.full((4,), 10.0), torch.tensor([75, 76, 99, 100]), 100)
    assert right.tolist() == pytest.approx([10.0, 9.6, 0.4, 0.0], abs=1e-6)
    wrong = overlong_reward(coati, torch.zeros(2), torch.tensor([99, 100]), 100)
    assert wrong.tolist() == pytest.approx([-9.6, 0.0], abs=1e-6)
    assert overlong_reward(PolicyConfig(), rewards, lengths, 100) is rewards


def test_overlong_width_is_capped_by_a_share_of_the_limit() -> None:
    policy = PolicyConfig(overlong_cache=4096, overlong_fraction=0.25)
    penalized_rewards = overlong_reward(policy, torch.zeros(3), torch.tensor([12, 14, 16]), 16)
    assert penalized_rewards.tolist() == pytest.approx([0.0, -0.5, -1.0])


def test_truncated_rows() -> None:
    lengths, stopped = torch.tensor([10, 10, 5, 0]), torch.tensor([False, True, True, True])
    assert rows_in_loss(PolicyConfig(), lengths, stopped, 10).all()
    cut = rows_in_loss(PolicyConfig(filter_truncated=True), lengths, stopped, 10)
    assert cut.tolist() == [False, True, True, True]
    at_limit = PolicyConfig(filter_truncated=True, treat_max_len_as_truncated=True)
    assert rows_in_loss(at_limit, lengths, stopped, 10).tolist() == [False, False, True, True]
