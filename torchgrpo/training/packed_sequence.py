"""Rows of a batch as ONE sequence without padding: each prompt once, the responses to it behind it.

    ids        p0 p0 p0 | r00 r00 | r01 r01 r01 | ...   p1 p1 | r10 ...       L positions, all of them real
    positions  0  1  2  | 3   4   | 3   4   5   |       0  1  | 2

Sharing is exact: what a prompt's tokens attend to does not depend on which response comes after them. Rows share a
prompt where they lie side by side and their prompts are equal, so any rows of a batch can be packed, parts of groups
too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchgrpo.batches.batch import Tokens
from torchgrpo.training.attention import Segments


@dataclass(frozen=True)
class Packed:
    """ids, positions: int64 [1, L]. where: int64 [M], the place in L of the hidden state that predicts each token in
    the loss, in the order of `tokens.loss_mask`'s true elements."""

    ids: Tensor
    positions: Tensor
    segments: Segments
    where: Tensor


def pack(tokens: Tokens) -> Packed:
    """The packed sequence of [N] rows, on their device. A response goes as far as its last target has to see."""
    rows, (prompt_width, width) = len(tokens), (tokens.prompt.shape[1], tokens.response.shape[1])
    begins, own = _begins(tokens), _needed(tokens.loss_mask)
    prompt_lengths = tokens.prompt_mask.sum(1)
    columns = torch.arange(width, device=own.device)
    taken = torch.cat([tokens.prompt_mask & begins[:, None], columns < own[:, None]], dim=1)
    places = (taken.flatten().cumsum(0) - 1).view(rows, -1)
    positions = torch.cat([tokens.prompt_mask.cumsum(1) - 1, prompt_lengths[:, None] + columns], dim=1)
    groups, first = begins.cumsum(0) - 1, begins.nonzero()[:, 0]
    last_of_prompt = places[first, prompt_width - 1]
    before = torch.cat([last_of_prompt[groups][:, None], places[:, prompt_width:-1]], dim=1)
    segments = Segments(
        prompt_starts=last_of_prompt + 1 - prompt_lengths[first],
        prompt_lengths=prompt_lengths[first],
        starts=places[:, -1] + 1 - own,
        lengths=own,
        groups=groups,
    )
    return Packed(
        torch.cat([tokens.prompt, tokens.response], dim=1)[taken][None],
        positions[taken][None],
        segments,
        before[tokens.loss_mask],
    )


def _begins(tokens: Tokens) -> Tensor:
    """bool [N]: rows whose prompt is not that of the row before."""
    prompt, mask = tokens.prompt, tokens.prompt_mask
    differs = ((prompt[1:] != prompt[:-1]) | (mask[1:] != mask[:-1])).any(1)
    return torch.cat([differs.new_ones(1), differs])


def _needed(loss_mask: Tensor) -> Tensor:
    """int64 [N]: response tokens that come before the last target of each row."""
    columns = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    return torch.where(loss_mask, columns, 0).amax(1)


def packed_costs(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row [N]: the number of its prompt among those that follow one another, the positions of that prompt,
    and the positions that the row adds to it."""
    return _begins(tokens).cumsum(0) - 1, tokens.prompt_mask.sum(1), _needed(tokens.loss_mask)


def packed_positions(tokens: Tokens) -> int:
    """Positions of the packed sequence of [N] rows."""
    return int(tokens.prompt_mask.sum(1)[_begins(tokens)].sum() + _needed(tokens.loss_mask).sum())


def real_tokens(tokens: Tokens) -> int:
    """Each prompt once, and every response."""
    prompts = tokens.prompt_mask.sum(1)[_begins(tokens)].sum()
    return int(prompts + tokens.response_mask.sum())
