"""Packs prompts and responses into one sequence, shared prompts once, and counts its positions.

Each prompt occurs once, followed by its responses.

    ids        p0 p0 p0 | r00 r00 | r01 r01 r01 | ...   p1 p1 | r10 ...       L positions without padding
    positions  0  1  2  | 3   4   | 3   4   5   |       0  1  | 2

Sharing a prompt is exact: the attention of its tokens does not depend on the response that follows. Adjacent
rows with equal prompts share the prompt, so any rows of a batch can be packed, incomplete groups too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.microbatch_sizes import padded_positions
from torchgrpo.training.context_parallel import ContextGroup
from torchgrpo.training.packed_attention import Segments


@dataclass(frozen=True)
class PackedSequence:
    """Packed rows of a batch.

    ids, positions: int64 [1, L], token ids and position ids.
    segments: positions of prompts and responses.
    target_positions: int64 [M], index in L of the hidden state that predicts each token in the loss, in the
        order of the true elements of `tokens.loss_mask`.
    """

    ids: Tensor
    positions: Tensor
    segments: Segments
    target_positions: Tensor


def pack_rows(tokens: Tokens) -> PackedSequence:
    """Packs [N] rows on their device.

    A response is cut after the last token that its last target attends to.
    """
    rows, (prompt_width, width) = len(tokens), (tokens.prompt.shape[1], tokens.response.shape[1])
    new_prompt, response_lengths = _starts_new_prompt(tokens), _needed_response_lengths(tokens.loss_mask)
    prompt_lengths = tokens.prompt_mask.sum(1)
    columns = torch.arange(width, device=response_lengths.device)
    is_packed = torch.cat([tokens.prompt_mask & new_prompt[:, None], columns < response_lengths[:, None]], dim=1)
    indices = (is_packed.flatten().cumsum(0) - 1).view(rows, -1)
    positions = torch.cat([tokens.prompt_mask.cumsum(1) - 1, prompt_lengths[:, None] + columns], dim=1)
    groups, first = new_prompt.cumsum(0) - 1, new_prompt.nonzero()[:, 0]
    last_of_prompt = indices[first, prompt_width - 1]
    previous = torch.cat([last_of_prompt[groups][:, None], indices[:, prompt_width:-1]], dim=1)
    segments = Segments(
        prompt_starts=last_of_prompt + 1 - prompt_lengths[first],
        prompt_lengths=prompt_lengths[first],
        starts=indices[:, -1] + 1 - response_lengths,
        lengths=response_lengths,
        groups=groups,
    )
    return PackedSequence(
        torch.cat([tokens.prompt, tokens.response], dim=1)[is_packed][None],
        positions[is_packed][None],
        segments,
        previous[tokens.loss_mask],
    )


def pad_to_blocks(sequence: PackedSequence) -> PackedSequence:
    """Pads a packed sequence to whole blocks of flex attention.

    Sequences of many lengths then have few shapes. The padding is a prompt without responses, so that no other
    position attends to it.
    """
    ids, segments = sequence.ids, sequence.segments
    padding = torch.arange(padded_positions(ids.shape[1]) - ids.shape[1], device=ids.device)[None]
    if not padding.numel():
        return sequence
    padded = Segments(
        prompt_starts=torch.cat([segments.prompt_starts, segments.prompt_starts.new_tensor([ids.shape[1]])]),
        prompt_lengths=torch.cat([segments.prompt_lengths, segments.prompt_lengths.new_tensor([padding.numel()])]),
        starts=segments.starts,
        lengths=segments.lengths,
        groups=segments.groups,
    )
    return PackedSequence(
        torch.cat([ids, torch.zeros_like(padding)], dim=1),
        torch.cat([sequence.positions, padding], dim=1),
        padded,
        sequence.target_positions,
    )


def slice_sequence(sequence: PackedSequence, context: ContextGroup, multiple: int) -> tuple[PackedSequence, Tensor]:
    """Returns this rank's slice of a packed sequence, and which targets are in it.

    The sequence is padded to slices of equal length by a segment that no row attends to. The segments of the slice
    are those of the whole sequence; `target_positions` are positions in the slice. The targets in it are indices
    int64 [m] into the targets of the whole sequence.
    multiple: positions of which each slice has a whole multiple.
    """
    whole, length = sequence.segments, sequence.ids.shape[1]
    padding = context.padded_length(length, multiple) - length
    segments = Segments(
        prompt_starts=pad(whole.prompt_starts, (0, 1), value=length),
        prompt_lengths=pad(whole.prompt_lengths, (0, 1), value=padding),
        starts=whole.starts,
        lengths=whole.lengths,
        groups=whole.groups,
        context=context,
    )
    width = (length + padding) // context.size
    start = width * context.rank
    targets = (sequence.target_positions // width == context.rank).nonzero()[:, 0]
    ids, positions = (pad(each, (0, padding))[:, start : start + width] for each in (sequence.ids, sequence.positions))
    return PackedSequence(ids, positions, segments, sequence.target_positions[targets] - start), targets


def _starts_new_prompt(tokens: Tokens) -> Tensor:
    """Returns a mask [N] of rows whose prompt differs from that of the previous row."""
    prompt, mask = tokens.prompt, tokens.prompt_mask
    differs = ((prompt[1:] != prompt[:-1]) | (mask[1:] != mask[:-1])).any(1)
    return torch.cat([differs.new_ones(1), differs])


def _needed_response_lengths(loss_mask: Tensor) -> Tensor:
    """Counts the response tokens before the last target of each row, int64 [N]."""
    columns = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    return torch.where(loss_mask, columns, 0).amax(1)


def packed_row_costs(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the costs of each row in a packed sequence, [N] each.

    Returns the index of the row's prompt in the sequence, the positions of the prompt, and the positions that
    the row adds.
    """
    return (
        _starts_new_prompt(tokens).cumsum(0) - 1,
        tokens.prompt_mask.sum(1),
        _needed_response_lengths(tokens.loss_mask),
    )


def packed_positions(tokens: Tokens) -> int:
    """Counts the positions of the packed sequence of [N] rows."""
    return int(
        tokens.prompt_mask.sum(1)[_starts_new_prompt(tokens)].sum() + _needed_response_lengths(tokens.loss_mask).sum()
    )


def count_real_tokens(tokens: Tokens) -> int:
    """Counts the tokens without padding, a shared prompt once."""
    prompts = tokens.prompt_mask.sum(1)[_starts_new_prompt(tokens)].sum()
    return int(prompts + tokens.response_mask.sum())
