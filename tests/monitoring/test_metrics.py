"""What a batch says about itself, against numbers that were counted by hand."""

import pytest
import torch
from tensordict import TensorDict

from monitoring.metrics import generated_metrics, rollout_metrics, without_clocks

REPEATS = 3
SCORED, INVALID, ERROR = range(3)
STOP, LENGTH = range(2)


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def batch() -> TensorDict:
    """Three groups: one with an error, one of equal rewards with an invalid one, one that was not judged at all.

    Rewards and parts of what errored are numbers that nobody may count. Row i has LENGTHS[i] tokens.
    """
    rows = [9]
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 3, 2, 1])
    inside = torch.arange(6)[None] < lengths[:, None]
    status = column([SCORED, SCORED, ERROR, SCORED, SCORED, INVALID, ERROR, ERROR, ERROR])
    judged = status != ERROR
    parts = TensorDict(format=column([0.5, 1.0, 77.0, 0.0, 0.0, 0.0, 77.0, 77.0, 77.0]), batch_size=rows)
    following = TensorDict(
        reward=column([1.0, 0.0, 9.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0]),
        reward_status=status,
        reward_parts=parts,
        batch_size=rows,
    )
    return TensorDict(
        next=following,
        tokens=TensorDict(response_mask=inside, loss_mask=inside.clone(), batch_size=rows),
        mask=inside & judged,
        advantage=column([2.0, -1.0, 50.0, 0.0, 0.0, 0.0, 50.0, 50.0, 50.0]),
        finish_reason=column([STOP, LENGTH, STOP, STOP, STOP, LENGTH, STOP, STOP, LENGTH]),
        policy_version=torch.full((9, 6), 7),
        batch_size=rows,
    )


def test_a_batch_by_hand() -> None:
    metrics = rollout_metrics(batch(), REPEATS, policy_version=7)
    assert metrics == pytest.approx(
        {
            "reward/mean": 1 / 5,
            "reward/std": (0.8 / 4) ** 0.5,
            "reward/zero_variance_groups": 2 / 3,
            "reward/errors": 4 / 9,
            "reward/invalid": 1 / 9,
            "reward/format": 1.5 / 5,
            "advantage/mean": 1 / 5,
            "advantage/std": (4.8 / 4) ** 0.5,
            "length/response_mean": 3.0,
            "length/response_max": 6.0,
            "length/truncated": 3 / 9,
            "sample_utilization": 5 / 9,
            "policy_version": 7.0,
            "age/mean": 0.0,
            "age/max": 0.0,
            "age/histogram/0": 18.0,
        }
    )


def test_what_only_some_batches_have() -> None:
    some = batch()
    some["temperature"] = torch.linspace(0.5, 1.3, 9)[:, None]
    some["length_reward"] = column([-1.0, -0.5, 66.0, 0.0, 0.0, 0.0, 66.0, 66.0, 66.0])
    metrics = rollout_metrics(some, REPEATS, policy_version=7)
    assert metrics["rollout/temperature"] == pytest.approx(0.9)
    assert metrics["reward/length"] == pytest.approx(-1.5 / 5)


def test_where_little_or_nothing_was_judged_all_numbers_are_finite() -> None:
    some = batch()
    some["next", "reward_status"][1:] = ERROR
    some["mask"][1:] = False
    metrics = rollout_metrics(some, REPEATS, policy_version=7)
    told = ("reward/mean", "reward/std", "advantage/mean", "advantage/std", "reward/zero_variance_groups")
    assert [metrics[name] for name in told] == [1.0, 0.0, 2.0, 0.0, 1.0]
    some["next", "reward_status"][:] = ERROR
    some["mask"][:] = False
    metrics = rollout_metrics(some, REPEATS, policy_version=7)
    told = ("reward/mean", "reward/format", "advantage/mean", "sample_utilization", "age/mean", "age/max")
    assert [metrics[name] for name in told] == [0.0] * 6


def test_ages_are_of_the_tokens_that_are_trained_on() -> None:
    """Row 0 has one token of version 4, row 1 two of 7 and 6; row 2, which errored, is the oldest of all."""
    some = batch()
    some["policy_version"][0], some["policy_version"][2] = 4, 0
    some["policy_version"][1, 1] = 6
    metrics = rollout_metrics(some, REPEATS, policy_version=7)
    ages = {name: value for name, value in metrics.items() if name.startswith("age/")}
    assert ages == {
        "age/mean": pytest.approx((3 + 1) / 18),
        "age/max": 3.0,
        "age/histogram/0": 16.0,
        "age/histogram/1": 1.0,
        "age/histogram/2": 0.0,
        "age/histogram/3": 1.0,
    }


def generated(**sums: list[float]) -> TensorDict:
    """The totals of each group's place, in all of its rows."""
    parts = TensorDict(format=column(sums.pop("format")), batch_size=[3])
    columns = {name: column(values).double() for name, values in sums.items()}
    totals = TensorDict(**columns, reward_parts=parts, batch_size=[3])
    return totals[torch.arange(9) // REPEATS]


def test_with_replaced_groups_the_rewards_are_those_of_all_that_was_generated() -> None:
    """Six groups of three for three places, two of which were replaced: 10 of 18 completions were judged."""
    some = batch()
    some["generated"] = generated(
        groups=[1, 2, 3],
        completions=[3, 6, 9],
        judged=[2, 5, 3],
        invalid=[0, 1, 2],
        reward=[1, 4, 0],
        reward_squared=[1, 8, 0],
        zero_variance=[0, 1, 2],
        format=[1.5, 3.5, 1.0],
    )
    metrics = rollout_metrics(some, REPEATS, policy_version=7)
    told = {
        "groups/generated": 6.0,
        "reward/mean": 5 / 10,
        "reward/std": ((9 - 10 * 0.25) / 9) ** 0.5,
        "reward/zero_variance_groups": 3 / 6,
        "reward/errors": 8 / 18,
        "reward/invalid": 3 / 18,
        "reward/format": 6 / 10,
        "sample_utilization": 5 / 18,
    }
    assert {name: metrics[name] for name in told} == pytest.approx(told)
    assert metrics["advantage/mean"] == pytest.approx(1 / 5)  # of what is trained on


def test_where_nothing_was_replaced_only_the_number_of_groups_is_added() -> None:
    some = batch()
    some["generated"] = generated(completions=[3, 3, 3], groups=[1, 1, 1], judged=[2, 3, 0], format=[0, 0, 0])
    assert generated_metrics(some, REPEATS) == {"groups/generated": 3.0}


def test_where_none_of_it_was_judged_all_numbers_are_finite() -> None:
    some, nothing = batch(), [0.0, 0.0, 0.0]
    some["generated"] = generated(
        groups=[2, 2, 2],
        completions=[6, 6, 6],
        zero_variance=[2, 2, 2],
        **dict.fromkeys(("judged", "invalid", "reward", "reward_squared", "format"), nothing),
    )
    metrics = rollout_metrics(some, REPEATS, policy_version=7)
    told = ("reward/mean", "reward/std", "reward/format", "reward/errors", "reward/zero_variance_groups")
    assert [metrics[name] for name in told] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_turns_are_counted_where_the_environment_wrote_some_tokens() -> None:
    """Row 3 (4 tokens): drawn, written, drawn, drawn. Row 5 (6 tokens): d w w d w d. The others are one turn each."""
    assert "turns/mean" not in rollout_metrics(batch(), REPEATS, policy_version=7)
    some = batch()
    some["tokens", "loss_mask"][3, 1] = False
    for written in (1, 2, 4):
        some["tokens", "loss_mask"][5, written] = False
    metrics = rollout_metrics(some, REPEATS, policy_version=7)
    assert metrics["turns/mean"] == pytest.approx((7 + 2 + 3) / 9)
    assert metrics["turns/drawn_tokens"] == pytest.approx((27 - 4) / 9)


def test_what_a_clock_measured_is_left_out() -> None:
    row = {"reward/mean": 1.0, "time/push_s": 2.0, "idle/engines": 0.5, "throughput/tokens_per_s": 9.0}
    assert without_clocks(row) == {"reward/mean": 1.0}
