"""How an iteration's groups become optimizer steps."""

import pytest
import torch

from tests.groups import make_completion, make_group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.minibatches import minibatches

REPEATS = 3


def groups(count: int) -> Rollout:
    """`count` groups of REPEATS rows; each row's reward is its number."""
    rows = [make_completion(3, float(row)) for row in range(count * REPEATS)]
    return Rollout.of(
        [make_group(start, rows[start : start + REPEATS]) for start in range(0, len(rows), REPEATS)]
    )


def numbers(rollout: Rollout) -> list[int]:
    """The numbers of its rows, which records and tensors agree on."""
    in_tensors = [int(reward) for reward in rollout.batch.next.reward[:, 0]]
    assert in_tensors == [int(verdict.score) for group in rollout.groups for verdict in group.verdicts]
    assert rollout.batch.group_id[::REPEATS, 0].tolist() == [group.group_id for group in rollout.groups]
    return in_tensors


def steps(count: int, groups_per_step: int, epochs: int = 1, seed: int = 0) -> list[list[int]]:
    """The rows of every optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    slices = minibatches(groups(count), groups_per_step, epochs, generator)
    return [numbers(part) for part in slices]


def test_every_group_comes_once_an_epoch_and_whole() -> None:
    taken = steps(6, groups_per_step=2, epochs=2)
    assert [len(rows) for rows in taken] == [2 * REPEATS] * 6
    for epoch in (taken[:3], taken[3:]):
        pieces = sorted(rows[start : start + REPEATS] for rows in epoch for start in (0, REPEATS))
        assert pieces == [[3 * group, 3 * group + 1, 3 * group + 2] for group in range(6)]
    assert taken[:3] != taken[3:]
    assert taken == steps(6, 2, epochs=2)
    assert taken != steps(6, 2, epochs=2, seed=1)


def test_groups_that_fill_no_step_form_a_smaller_one() -> None:
    taken = steps(5, groups_per_step=2)
    assert [len(rows) for rows in taken] == [6, 6, 3]
    assert sorted(row for rows in taken for row in rows) == list(range(15))


@pytest.mark.parametrize("groups_per_step", [4, 9])
def test_a_batch_of_one_step_stays_as_it_is(groups_per_step: int) -> None:
    batch = groups(4)
    taken = list(minibatches(batch, groups_per_step, 2, torch.Generator()))
    assert [part is batch for part in taken] == [True, True]
