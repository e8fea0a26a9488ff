"""Gathers values of batch rows by completion; each of its sequences has a row."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from envs.group import SampledCompletion


def first_rows(completions: Sequence[SampledCompletion]) -> list[int]:
    """Returns the index of the first row of each completion."""
    return [0, *accumulate(one.num_sequences for one in completions)][:-1]


def completions_in_loss(completions: Sequence[SampledCompletion], mask: Tensor) -> list[bool]:
    """Returns whether each completion has a token in the loss.

    mask: bool [N, R], the tokens in the loss.
    """
    rows_of_completions = mask.any(-1).split([one.num_sequences for one in completions])
    return [bool(rows.any()) for rows in rows_of_completions]


def mean_advantages(completions: Sequence[SampledCompletion], advantage: Tensor, mask: Tensor) -> list[float]:
    """Returns the mean advantage of each completion over its tokens in the loss.

    This is 0 without such tokens.

    advantage: [N, 1] or [N, R]. mask: bool [N, R], the tokens in the loss.
    """
    sums = advantage.expand(mask.shape).where(mask, 0.0).sum(1)
    counts = torch.tensor([one.num_sequences for one in completions], device=mask.device)
    numbers = torch.arange(len(completions), device=mask.device).repeat_interleave(counts)
    totals = [rows.new_zeros(len(completions)).index_add(0, numbers, rows) for rows in (sums, mask.sum(1))]
    return list((totals[0] / totals[1].clamp(min=1)).tolist())
