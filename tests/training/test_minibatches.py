"""Tests of the split of a rollout into minibatches."""

import pytest
import torch

from tests.groups import make_completion, make_group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.minibatches import minibatches

REPEATS = 3


def groups(count: int) -> Rollout:
    """Returns `count` groups of REPEATS rows; the reward of a row is its number."""
    rows = [make_completion(3, float(row)) for row in range(count * REPEATS)]
    return Rollout.from_groups(
        [make_group(start, rows[start : start + REPEATS]) for start in range(0, len(rows), REPEATS)]
    )


def numbers(rollout: Rollout) -> list[int]:
    """Returns the row numbers of a rollout; asserts that records and tensors agree."""
    in_tensors = [int(reward) for reward in rollout.batch.next.reward[:, 0]]
    assert in_tensors == [int(verdict.score) for group in rollout.groups for verdict in group.verdicts]
    assert rollout.batch.group_id[::REPEATS, 0].tolist() == [group.group_id for group in rollout.groups]
    return in_tensors


def steps(count: int, groups_per_step: int, epochs: int = 1, seed: int = 0) -> list[list[int]]:
    """Returns the rows of each optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    slices = minibatches(groups(count), groups_per_step, epochs, generator)
    return [numbers(part) for part in slices]


def test_each_group_occurs_once_per_epoch() -> None:
    step_rows = steps(6, groups_per_step=2, epochs=2)
    assert [len(rows) for rows in step_rows] == [2 * REPEATS] * 6
    for epoch in (step_rows[:3], step_rows[3:]):
        group_rows = sorted(rows[start : start + REPEATS] for rows in epoch for start in (0, REPEATS))
        assert group_rows == [[3 * group, 3 * group + 1, 3 * group + 2] for group in range(6)]
    assert step_rows[:3] != step_rows[3:]
    assert step_rows == steps(6, 2, epochs=2)
    assert step_rows != steps(6, 2, epochs=2, seed=1)


def test_leftover_groups_form_a_smaller_minibatch() -> None:
    step_rows = steps(5, groups_per_step=2)
    assert [len(rows) for rows in step_rows] == [6, 6, 3]
    assert sorted(row for rows in step_rows for row in rows) == list(range(15))


@pytest.mark.parametrize("groups_per_step", [4, 9])
def test_a_single_minibatch_is_the_rollout(groups_per_step: int) -> None:
    batch = groups(4)
    step_rows = list(minibatches(batch, groups_per_step, 2, torch.Generator()))
    assert [part is batch for part in step_rows] == [True, True]
