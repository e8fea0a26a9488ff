"""The metrics of a hand-made batch against numbers worked out by hand."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from envs.token_env import LENGTH, OUTCOMES, STOP
from monitoring.metrics import rollout_metrics, without_clocks
from rollout.selection import totals

REPEATS = 3
REWARDS = [[1.0, 0.0, 7.0], [2.0, 2.0, -1.0], [0.5, 0.5, 0.5]]
STATUS = [["scored", "scored", "error"], ["scored", "scored", "invalid"], ["scored", "scored", "scored"]]
LENGTHS = [[1, 2, 4], [3, 3, 1], [2, 2, 2]]


def batch() -> TensorDict:
    """Three groups: one with an error, whose reward counts in nothing, one with an invalid answer, one of equals."""
    rows = len(REWARDS) * REPEATS
    status = [OUTCOMES.index(outcome) for group in STATUS for outcome in group]
    lengths = torch.tensor(LENGTHS).view(-1, 1)
    response = torch.arange(4) < lengths
    valid = torch.tensor(status)[:, None] != OUTCOMES.index("error")
    reward = torch.tensor(REWARDS).view(-1, 1)
    following = TensorDict(
        reward=reward,
        reward_status=torch.tensor(status)[:, None],
        reward_parts=TensorDict(accuracy=(reward >= 1).float(), batch_size=[rows]),
        batch_size=[rows],
    )
    return TensorDict(
        next=following,
        tokens=TensorDict(response_mask=response, loss_mask=response, batch_size=[rows]),
        mask=response & valid,
        advantage=torch.tensor([[1.0, -1.0, 9.0], [0.5, 0.5, -1.0], [0.0, 0.0, 0.0]]).view(-1, 1),
        finish_reason=torch.tensor([[STOP]] * 7 + [[LENGTH]] * 2),
        policy_version=torch.full((rows, 4), 5),
        batch_size=[rows],
    )


EXPECTED = {
    "reward/mean": (1 + 0 + 2 + 2 - 1 + 0.5 * 3) / 8,
    "reward/accuracy": 3 / 8,
    "reward/zero_variance_groups": 1 / 3,
    "reward/errors": 1 / 9,
    "reward/invalid": 1 / 9,
    "advantage/mean": 0.0,
    "advantage/std": ((1 + 1 + 0.25 + 0.25 + 1) / 7) ** 0.5,
    "length/response_mean": 20 / 9,
    "length/response_max": 4.0,
    "length/truncated": 2 / 9,
    "sample_utilization": 8 / 9,
    "policy_version": 7.0,
    "age/mean": 2.0,
    "age/max": 2.0,
    "age/histogram/0": 0.0,
    "age/histogram/1": 0.0,
    "age/histogram/2": 16.0,
}
JUDGED = [1.0, 0.0, 2.0, 2.0, -1.0, 0.5, 0.5, 0.5]
STD = (sum((value - 0.6875) ** 2 for value in JUDGED) / 7) ** 0.5


def test_a_batch_by_hand() -> None:
    assert rollout_metrics(batch(), REPEATS, 7) == pytest.approx(EXPECTED | {"reward/std": STD})


def test_a_batch_that_is_all_that_was_generated() -> None:
    whole: Any = batch()
    whole["generated"] = totals(whole, REPEATS).repeat_interleave(REPEATS, dim=0)
    expected = EXPECTED | {"reward/std": STD, "groups/generated": 3.0}
    assert rollout_metrics(whole, REPEATS, 7) == pytest.approx(expected)


def test_what_was_generated_and_not_chosen_counts() -> None:
    """A group of equal rewards was replaced by the first one, which now carries both."""
    chosen: Any = batch()
    sums = totals(chosen, REPEATS)
    sums["groups"][0] += 1
    sums["completions"][0] += 3
    sums["judged"][0] += 2
    sums["invalid"][0] += 1
    sums["reward"][0] += 2.0
    sums["reward_squared"][0] += 4.0
    sums["zero_variance"][0] += 1
    sums["reward_parts", "accuracy"][0] += 1
    chosen["generated"] = sums.repeat_interleave(REPEATS, dim=0)
    found = rollout_metrics(chosen, REPEATS, 7)
    judged = [*JUDGED, 2.0, 0.0]
    mean = sum(judged) / 10
    expected = EXPECTED | {
        "groups/generated": 4.0,
        "reward/mean": mean,
        "reward/std": (sum((value - mean) ** 2 for value in judged) / 9) ** 0.5,
        "reward/accuracy": 4 / 10,
        "reward/zero_variance_groups": 2 / 4,
        "reward/errors": 1 - 10 / 12,
        "reward/invalid": 2 / 12,
        "sample_utilization": 8 / 12,
    }
    assert found == pytest.approx(expected)


def test_totals_tell_what_was_invalid_from_what_failed() -> None:
    sums = totals(batch(), REPEATS)
    assert sums["invalid"][:, 0].tolist() == [0, 1, 0]
    assert sums["judged"][:, 0].tolist() == [2, 3, 3]
    assert sums["zero_variance"][:, 0].tolist() == [0, 0, 1]


def test_a_group_of_which_nothing_could_be_judged_teaches_nothing() -> None:
    lost: Any = batch()[:REPEATS]
    lost["next", "reward_status"] = torch.full((REPEATS, 1), OUTCOMES.index("error"))
    lost["mask"] = torch.zeros_like(lost["mask"])
    found = rollout_metrics(lost, REPEATS, 7)
    assert found["reward/zero_variance_groups"] == found["reward/errors"] == 1.0
    assert [found[name] for name in ("reward/mean", "reward/std", "advantage/std", "age/max")] == [0.0] * 4


def test_the_spread_of_a_single_answer_is_zero() -> None:
    found = rollout_metrics(batch()[:1], 1, 7)
    assert (found["reward/mean"], found["reward/std"], found["advantage/std"]) == (1.0, 0.0, 0.0)


def test_turns_and_what_shapes_a_reward() -> None:
    several: Any = batch()[:2]
    several["tokens", "response_mask"] = torch.ones(2, 4, dtype=torch.bool)
    several["tokens", "loss_mask"] = torch.tensor([[True, False, True, True], [True, True, True, True]])
    several["length_reward"] = torch.tensor([[-0.5], [0.0]])
    several["temperature"] = torch.tensor([[0.75], [0.75]])
    found = rollout_metrics(several, 2, 7)
    assert (found["turns/mean"], found["turns/drawn_tokens"]) == (1.5, 3.5)
    assert (found["reward/length"], found["rollout/temperature"]) == (-0.25, 0.75)


def test_what_depends_on_the_machine_can_be_left_out() -> None:
    row = {"time/elapsed_s": 1.0, "timestamp": "2026", "throughput/tokens_per_s": 2.0, "tokens/total": 3.0}
    assert without_clocks(row) == {"tokens/total": 3.0}
