"""Tests of a batch's rows by completion, and of microbatches that keep them together."""

import pytest
import torch

from config.schema.policy import PolicyConfig
from envs.group import SequenceStart
from tests.groups import make_completion, make_group
from tests.training.episode_groups import random_streams, split_groups
from torchgrpo.batches.batch import Batch, collate, environment_token_mask
from torchgrpo.batches.episodes import EpisodeRows
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.microbatches import partition_by_gradient, partition_rows


def split_batch() -> Batch:
    """Returns a batch of three completions with two, one and two sequences.

    The prompt has two tokens.
    """
    first, second, third = make_completion(5), make_completion(3), make_completion(4, sampled_mask=[True, False] * 2)
    first.sequence_starts = [SequenceStart(0, (5, 6)), SequenceStart(2, (5, 6, 1, 2, 9))]
    third.sequence_starts = [SequenceStart(0, (5, 6)), SequenceStart(2, (5,))]  # its history was rewritten
    return collate([make_group(0, [first, second, third])])


def test_rows_of_completions() -> None:
    batch = split_batch()
    rows = batch.episode_rows
    assert rows is not None
    assert (rows.count, batch.num_completions, len(batch)) == (3, 3, 5)
    assert rows.index.tolist() == [0, 0, 1, 2, 2]
    assert rows.is_first.tolist() == [True, False, True, True, False]
    assert rows.ranges == [range(2), range(2, 3), range(3, 5)]
    assert rows.lengths.tolist() == [6, 6, 3, 2, 2], (
        "5 + 3 tokens less the prompt's 2, and the longer of 2 and 1 + 2 - 2"
    )
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
    assert rows.sum(values)[:, 0].tolist() == [3.0, 3.0, 4.0, 24.0, 24.0]
    unnumbered = EpisodeRows.from_masks(None, batch.tokens.prompt_mask, batch.tokens.response_mask)
    assert unnumbered.index.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(unnumbered.lengths, batch.tokens.response_mask.sum(1))


def test_tokens_of_completions_in_one_row() -> None:
    batch, rows = split_batch(), split_batch().episode_rows
    assert rows is not None
    mask = batch.tokens.loss_mask
    packed = rows.token_mask(mask)
    assert packed.sum(1).tolist() == [5, 3, 2] and packed.shape == (3, 6)
    numbers = torch.zeros(3, 6).masked_scatter(packed, torch.arange(1.0, 11.0))
    spread = rows.spread(numbers, mask)
    assert spread[mask].tolist() == list(range(1, 11)) and not spread[~mask].any()
    assert rows.spread(torch.tensor([[1.0], [2.0], [3.0]]), mask)[:, 0].tolist() == [1, 1, 2, 3, 3]


def test_selected_groups_keep_their_completions() -> None:
    rollout = Rollout.from_groups(split_groups(random_streams(0), 0, share=1.0))
    some = rollout[[3, 1]]
    rows = some.batch.episode_rows
    assert rows is not None and rows.count == 8
    assert [len(each) for each in rows.ranges] == [
        one.num_sequences for group in some.groups for one in group.completions
    ]


def test_environment_tokens_of_a_completion_count_with_any_of_its_rows() -> None:
    batch = split_batch()
    mask = torch.zeros_like(batch.tokens.loss_mask)
    mask[4, 0] = True
    assert environment_token_mask(batch.tokens, mask, batch.episode_rows).nonzero().tolist() == [[3, 1], [4, 1]]
    assert environment_token_mask(batch.tokens, mask).nonzero().tolist() == [[4, 1]]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("max_tokens", [None, 1, 60, 300])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 3), (2, 3), (5, 1), (1, 100)])
def test_a_microbatch_has_all_rows_of_its_completions(
    workers: int, microbatches: int, max_tokens: int | None, packs: bool
) -> None:
    batch = collate(split_groups(random_streams(1, groups=8), 1, share=0.7))
    has_gradient = batch.group_id[:, 0] % 3 != 0
    for shares in (
        partition_rows(batch, workers, microbatches, max_tokens, packs),
        partition_by_gradient(batch, has_gradient, workers, microbatches, max_tokens, packs),
    ):
        used = [one for share in shares for one in share if not one.idle]
        assert torch.cat([one.rows for one in used]).sort().values.tolist() == list(range(len(batch)))
        episodes = [one.batch.episode[:, 0].tolist() for one in used]
        assert sum(len(set(each)) for each in episodes) == batch.num_completions
        for one in used:
            assert one.rows.tolist() == sorted(one.rows.tolist())
        if max_tokens == 1:
            assert len(used) == batch.num_completions


def test_totals_count_completions() -> None:
    batch = split_batch()
    batch.mask = batch.tokens.loss_mask.clone()
    batch.mask[2] = False
    totals = BatchTotals.from_batch(PolicyConfig(aggregation="pass_mean", pass_size=2), batch)
    assert (totals.tokens, totals.sequences, totals.nonempty, totals.width, totals.positions) == (7, 3, 2, 6, 18)
    assert totals.passes == 2 and totals.environment_tokens == 2
    some = totals.select(torch.tensor([3, 4]))
    assert some.episode_tokens is not None and some.episode_tokens.tolist() == [2, 2]
    assert some.pass_tokens is not None and some.pass_tokens.tolist() == [2, 2]


def test_episodes_survive_the_conversion_to_torchrl() -> None:
    batch = split_batch()
    assert torch.equal(Batch.from_torchrl(batch.to_torchrl()).episode, batch.episode)
