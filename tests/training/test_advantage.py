"""Tests of group advantages and the group filter against hand-computed numbers."""

import math
import statistics

import pytest
import torch

from config.schema.policy import PolicyConfig, load_policy
from torchgrpo.training.advantage import group_advantage, kl_reward_penalty
from torchgrpo.training.dynamic_sampling import groups_inside_filter_range

ONE_RIGHT = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("std_unbiased", "std_population", "batch", "none")


@pytest.mark.parametrize(
    ("preset", "first"),
    [
        ("grpo", 0.75 / (0.5 + 1e-4)),
        ("compat_megatron", 0.75 / (math.sqrt(0.1875) + 1e-4)),
        ("compat_trl", 0.75 / (0.5 + 1e-4)),
        ("compat_coati_grpo", 0.75 / (0.5 + 1e-4)),
        ("compat_verl", 0.75 / (0.5 + 1e-6)),
        ("compat_torchrl", 1.5),
        ("compat_nanochat", 0.75),
        ("dr_grpo", 0.75),
        ("rloo", 1.0),
    ],
)
def test_first_advantage_of_one_right_in_four(preset: str, first: float) -> None:
    assert group_advantage(load_policy(preset), ONE_RIGHT)[0, 0].item() == pytest.approx(first, rel=1e-12)


def test_leave_one_out_baseline_averages_valid_rewards() -> None:
    """Compares groups with three, two and one valid rewards to the mean of the others."""
    rewards = torch.tensor([[4.0, 1.0, 2.0], [4.0, 1.0, 9.0], [4.0, 9.0, 9.0]])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    advantage = group_advantage(load_policy("rloo"), rewards, valid)
    expected = [[2.5, -2.0, -0.5], [3.0, -3.0, 0.0], [0.0, 0.0, 0.0]]
    assert advantage.flatten().tolist() == pytest.approx([value for row in expected for value in row])


def test_second_best_baseline_gives_the_margin_of_valid_rewards() -> None:
    """Compares groups with three, two, one and no valid rewards."""
    rewards = torch.tensor([[4.0, 1.0, 2.0], [4.0, 1.0, 9.0], [4.0, 9.0, 9.0], [4.0, 9.0, 9.0]])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [False] * 3])
    policy = PolicyConfig(baseline="second_best", scale="none", group_of_one="zero")
    assert group_advantage(policy, rewards, valid).tolist() == [[2.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("scale", SCALES)
def test_a_batch_with_one_valid_reward_has_zero_advantages(scale: str) -> None:
    rewards, valid = torch.tensor([[3.0, 1.0], [5.0, 2.0]]), torch.tensor([[True, False], [False, False]])
    advantage = group_advantage(PolicyConfig(scale=scale, epsilon=0.0), rewards, valid)
    assert advantage.flatten().tolist() == [0.0] * 4


def test_against_plain_python() -> None:
    rewards = [[0.3, -1.2, 2.5, 0.0, 0.3], [7.0, 7.5, 6.0, 8.25, 7.0]]
    batch = statistics.stdev(rewards[0] + rewards[1])
    divisors = {"std_unbiased": statistics.stdev, "std_population": statistics.pstdev, "batch": lambda group: batch}
    for scale, divisor in divisors.items():
        ours = group_advantage(PolicyConfig(scale=scale, epsilon=0.01), torch.tensor(rewards, dtype=torch.float64))
        for group, row in zip(rewards, ours.tolist(), strict=True):
            mean, width = statistics.fmean(group), divisor(group) + 0.01
            assert row == pytest.approx([(reward - mean) / width for reward in group], rel=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", ["add", "clamp"])
def test_nowhere_nan(baseline: str, scale: str, rule: str) -> None:
    policy = PolicyConfig(baseline=baseline, scale=scale, epsilon_rule=rule, epsilon=0.0)
    rewards = torch.tensor(
        [[0.1, 0.1, 0.1], [1e8, 1e8 + 1, 1e8], [math.nan, 1.0, 2.0], [math.inf, math.nan, 3.0], [5.0, 6.0, 7.0]],
        dtype=torch.float64,
    )
    valid = torch.ones_like(rewards, dtype=torch.bool)
    valid[4] = False
    advantage = group_advantage(policy, rewards, valid)
    assert advantage.isfinite().all()
    assert advantage[4].eq(0).all()
    assert advantage[2, 0] == 0
    for single in (torch.tensor([[3.0]]), torch.zeros(2, 1), torch.zeros(0, 4)):
        assert group_advantage(policy, single).isfinite().all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.1, -7e-9])
def test_equal_rewards_are_exactly_zero(scale: str, value: float) -> None:
    other = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]]).double()
    equal = torch.full((1, 7), value, dtype=torch.float64)
    for baseline in ("mean", "leave_one_out"):
        policy = PolicyConfig(baseline=baseline, scale=scale, epsilon=0.0)
        assert group_advantage(policy, torch.cat([equal, other]))[0].eq(0).all()
        assert group_advantage(policy, torch.cat([other, equal]))[1].eq(0).all()


def test_huge_offset_keeps_the_difference() -> None:
    near = group_advantage(PolicyConfig(), torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    far = group_advantage(PolicyConfig(), torch.tensor([[1e8, 1e8 + 1]], dtype=torch.float64))
    assert torch.equal(near, far)


def test_completions_with_errors_enter_no_statistics() -> None:
    policy = PolicyConfig()
    with_error = group_advantage(
        policy, torch.tensor([[1.0, 0.0, 99.0, 0.0]]), torch.tensor([[True, True, False, True]])
    )
    without = group_advantage(policy, torch.tensor([[1.0, 0.0, 0.0]]))
    assert with_error[0, 2] == 0
    assert torch.equal(with_error[0, [0, 1, 3]], without[0])


def test_group_of_one() -> None:
    lone, valid = torch.tensor([[4.0, 9.0]]), torch.tensor([[True, False]])
    assert group_advantage(PolicyConfig(), lone, valid).eq(0).all()
    raw = group_advantage(PolicyConfig(group_of_one="raw", epsilon=1e-6), lone, valid)
    assert raw.tolist() == [[4.0 / (1 + 1e-6), 0.0]]
    assert group_advantage(load_policy("rloo", group_of_one="raw"), lone, valid).tolist() == [[4.0, 0.0]]


def test_filter_range_is_open() -> None:
    rewards = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 9.0]])
    valid = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    inside = groups_inside_filter_range(PolicyConfig(filter_range=[0.0, 1.0]), rewards, rewards.clamp(0, 1), valid)
    assert inside.tolist() == [False, False, True, False]
    spread = PolicyConfig(filter_range=[1e-6, math.inf], filter_on="reward_std")
    assert groups_inside_filter_range(spread, rewards, rewards, valid).tolist() == [False, False, True, False]
    nothing = torch.zeros_like(valid)
    assert not groups_inside_filter_range(PolicyConfig(), rewards, rewards, nothing).any()


def test_completions_with_errors_do_not_count_as_solved() -> None:
    """Errors count neither as failures nor as successes of a group."""
    success = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    valid = torch.tensor([[True, True, False]] * 3)
    inside = groups_inside_filter_range(PolicyConfig(filter_range=[0.0, 1.0]), success, success, valid)
    assert inside.tolist() == [False, False, True]


def test_the_deviation_filter_uses_the_population_deviation() -> None:
    """The filter compares the population deviation: 0.5 for rewards 0 and 1.

    Their sample deviation is 0.71.
    """
    rewards, valid = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    for high, inside in ((0.49, False), (0.51, True)):
        policy = PolicyConfig(filter_range=[0.1, high], filter_on="reward_std")
        assert groups_inside_filter_range(policy, rewards, rewards, valid).tolist() == [inside]


def test_reward_kl_is_the_sum_over_the_response() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, math.nan]])
    ref = torch.tensor([[-1.5, -1.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    policy = PolicyConfig(kl_coef=0.1, kl_estimator="k1", kl_placement="reward")
    assert kl_reward_penalty(policy, log_prob, ref, mask).tolist() == pytest.approx([0.1 * (0.5 - 1.0)])
    assert kl_reward_penalty(PolicyConfig(), log_prob, ref, mask).tolist() == [0.0]
