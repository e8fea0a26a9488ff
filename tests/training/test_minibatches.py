"""How an iteration's groups become optimizer steps, and a step's rows become pieces that fit into memory."""

import pytest
import torch

from tests.groups import make_completion, make_group
from training.batch import Batch, collate
from training.minibatches import microbatches, minibatches

REPEATS = 3


def groups(count: int) -> Batch:
    """`count` groups of REPEATS rows; each row's reward is its number."""
    return answered([3] * count * REPEATS, REPEATS)


def answered(lengths: list[int], repeats: int = 1) -> Batch:
    """Completions of these lengths; each row's reward is its number."""
    rows = [make_completion(length, float(row)) for row, length in enumerate(lengths)]
    return collate(
        [make_group(start, rows[start : start + repeats]) for start in range(0, len(rows), repeats)]
    )


def numbers(batch: Batch) -> list[int]:
    return [int(reward) for reward in batch.next.reward[:, 0]]


def steps(count: int, groups_per_step: int, epochs: int = 1, seed: int = 0) -> list[list[int]]:
    """The rows of every optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    slices = minibatches(groups(count), REPEATS, groups_per_step, epochs, generator)
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
    taken = list(minibatches(batch, REPEATS, groups_per_step, 2, torch.Generator()))
    assert [part is batch for part in taken] == [True, True]


@pytest.mark.parametrize(
    ("together", "expected"),
    [
        (1, [[3, 0], [5, 1], [2, 4]]),  # by length, equal ones in their order
        (2, [[2, 3], [0, 1], [4, 5]]),  # pairs by their longest member
    ],
)
def test_pieces_come_longest_first_and_say_where_their_rows_were(
    together: int, expected: list[list[int]]
) -> None:
    pieces = microbatches(answered([6, 3, 2, 9, 1, 4]), together, rows=2)
    assert [piece.rows.tolist() for piece in pieces] == expected
    assert [numbers(piece.batch) for piece in pieces] == expected


@pytest.mark.parametrize("rows", [6, 7])
def test_what_fits_into_one_piece_keeps_its_order(rows: int) -> None:
    batch = answered([6, 3, 2, 9, 1, 4])
    (piece,) = microbatches(batch, 1, rows)
    assert piece.batch is batch
    assert piece.rows.tolist() == [0, 1, 2, 3, 4, 5]
