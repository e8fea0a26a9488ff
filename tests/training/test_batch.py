"""Tests of batch tensors built from hand-written groups."""

import random

import torch

from tests.groups import make_completion, make_group, random_group
from torchgrpo.batches.batch import Batch, collate


def hand_written_batch() -> Batch:
    """Returns a batch of two groups of two completions.

    Prompts have 1 and 3 tokens, responses 2, 3, 1 and 0.
    """
    first = [
        make_completion([11, 12], 0.5, versions=[4, 5], log_probs=[-0.5, -0.25]),
        make_completion(
            [13, 14, 15], 1.0, sampled_mask=[True, False, True], finish_reason="length", log_probs=[-1.0, 0.0, -2.0]
        ),
    ]
    second = [
        make_completion([16], -1.0, outcome="invalid", versions=7),
        make_completion([], 9.0, outcome="error", finish_reason="abort"),
    ]
    return collate([make_group(3, first, prompt=[21]), make_group(1, second, prompt=[22, 23, 24], temperature=0.5)])


def test_prompts_are_padded_on_the_left() -> None:
    tokens = hand_written_batch().tokens
    assert tokens.prompt.tolist() == [[0, 0, 21], [0, 0, 21], [22, 23, 24], [22, 23, 24]]
    assert tokens.prompt_mask.tolist() == [[False, False, True]] * 2 + [[True] * 3] * 2


def test_responses_are_padded_on_the_right() -> None:
    tokens = hand_written_batch().tokens
    assert tokens.response.tolist() == [[11, 12, 0], [13, 14, 15], [16, 0, 0], [0, 0, 0]]
    assert tokens.response_mask.sum(-1).tolist() == [2, 3, 1, 0]
    assert tokens.response_mask.tolist() == [[True, True, False], [True] * 3, [True, False, False], [False] * 3]
    assert tokens.loss_mask.tolist() == [[True, True, False], [True, False, True], [True, False, False], [False] * 3]


def test_token_fields_are_aligned_with_responses() -> None:
    batch = hand_written_batch()
    assert batch.sample_log_prob.tolist() == [[-0.5, -0.25, 0], [-1, 0, -2], [-1, 0, 0], [0, 0, 0]]
    assert batch.policy_version.tolist() == [[4, 5, 0], [0, 0, 0], [7, 0, 0], [0, 0, 0]]


def test_fields_of_rows_and_groups() -> None:
    batch = hand_written_batch()
    assert batch.group_id.tolist() == [[3], [3], [1], [1]]
    assert batch.temperature.tolist() == [[1.0], [1.0], [0.5], [0.5]]
    assert batch.finish_reason.tolist() == [[0], [1], [0], [2]]
    assert batch.next.reward.tolist() == [[0.5], [1.0], [-1.0], [9.0]]
    assert batch.next.reward_status.tolist() == [[0], [0], [1], [2]]


def test_shapes_and_dtypes() -> None:
    batch, rows = hand_written_batch(), 4
    assert batch.batch_size == batch.tokens.batch_size == batch.next.batch_size == torch.Size([rows])
    for tensor, width, dtype in (
        (batch.tokens.prompt, 3, torch.int64),
        (batch.tokens.prompt_mask, 3, torch.bool),
        (batch.tokens.response, 3, torch.int64),
        (batch.tokens.response_mask, 3, torch.bool),
        (batch.tokens.loss_mask, 3, torch.bool),
        (batch.sample_log_prob, 3, torch.float32),
        (batch.policy_version, 3, torch.int64),
        (batch.group_id, 1, torch.int64),
        (batch.finish_reason, 1, torch.int64),
        (batch.temperature, 1, torch.float32),
        (batch.next.reward, 1, torch.float32),
        (batch.next.reward_status, 1, torch.int64),
    ):
        assert tensor.shape == (rows, width) and tensor.dtype == dtype
    added = (batch.advantage, batch.mask, batch.age, batch.ref_log_prob, batch.old_log_prob, batch.length_reward)
    assert added == (None,) * 6


def test_responses_without_any_token_have_a_column_of_padding() -> None:
    batch = collate([make_group(0, [make_completion([]), make_completion([])])])
    assert batch.tokens.response.tolist() == [[0], [0]]
    assert not batch.tokens.response_mask.any() and not batch.tokens.loss_mask.any()


def test_batches_exclude_candidates_left_out() -> None:
    long = make_completion(50)
    group = make_group(0, [make_completion(2)], unselected_candidates=[long], replaces=make_group(1, [long]))
    assert collate([group]).tokens.response.shape == (1, 2)


def test_rows_of_random_groups_equal_their_records() -> None:
    chance = random.Random(0)
    groups = [random_group(chance, number, repeats=3) for number in range(20)]
    batch = collate(groups)
    completions = [(group, one) for group in groups for one in group.completions]
    assert len(batch) == len(completions)
    for row, (group, one) in enumerate(completions):
        tokens, response = batch.tokens[row], batch.tokens[row].response_mask
        assert tokens.prompt[tokens.prompt_mask].tolist() == list(group.prompt)
        assert tokens.response[response].tolist() == one.token_ids
        expected = one.sampled_mask or [True] * len(one.token_ids)
        assert tokens.loss_mask[response].tolist() == expected
        assert batch.policy_version[row][response].tolist() == one.policy_versions
        assert torch.equal(batch.sample_log_prob[row][response], torch.tensor(one.log_probs))
        assert not tokens.response[~response].any() and not tokens.loss_mask[~response].any()


def test_teacher_tokens_have_the_same_responses() -> None:
    chance = random.Random(1)
    groups = [random_group(chance, number, repeats=3) for number in range(5)]
    assert collate(groups).teacher_tokens is None
    for group in groups:
        group.teacher_prompt = tuple(chance.randrange(1, 40) for _ in range(chance.randint(1, 12)))
    batch = collate(groups)
    teacher_tokens = batch.reference_tokens
    for row, group in enumerate(one for one in groups for _ in one.completions):
        assert teacher_tokens.prompt[row][teacher_tokens.prompt_mask[row]].tolist() == list(group.teacher_prompt)
        assert teacher_tokens.prompt_mask[row, -1]
    for name in ("response", "response_mask", "loss_mask"):
        assert torch.equal(getattr(teacher_tokens, name), getattr(batch.tokens, name)), name
    some = batch[[4, 1]].copy()
    assert torch.equal(some.reference_tokens.prompt, teacher_tokens.prompt[[4, 1]])
    again = Batch.from_tensors(batch.to_tensordict(retain_none=False))
    assert torch.equal(again.reference_tokens.prompt, teacher_tokens.prompt)


def test_ids_beyond_the_vocabulary_become_its_last_id() -> None:
    tokens = hand_written_batch().tokens
    fewer = tokens.clamp_to_vocabulary(15)
    assert fewer.response.tolist() == [[11, 12, 0], [13, 14, 14], [14, 0, 0], [0, 0, 0]]
    assert tokens.response.max() == 16 and torch.equal(fewer.loss_mask, tokens.loss_mask)
