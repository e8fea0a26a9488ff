"""Shares the rows of an optimizer step out: to workers, and each worker's to microbatches that fit into memory.

    batch ──packing.py──▶ bins of about equal positions ──▶ [worker][microbatch]

Every worker gets as many microbatches, for what they do together must match; one that has nothing left to do gets an
idle one. The largest come first, which finds out at once whether the memory suffices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgrpo.batches.batch import Batch
from torchgrpo.training.packing import packed_bins, padded_bins


@dataclass(frozen=True)
class Microbatch:
    """Completions that go through the model together. `rows` [n] int64: their places in the batch.

    idle: they stand for nothing in it. teaches: the gradient of one of them need not be zero.
    """

    rows: Tensor
    batch: Batch
    idle: bool = False
    teaches: bool = True


def share_out(
    batch: Batch, workers: int, microbatches: int, max_tokens: int | None, packs: bool
) -> list[list[Microbatch]]:
    """The microbatches of each worker, [workers][count]: every row of the batch once, balanced by positions.

    microbatches: of each worker, more where `max_tokens` needs them. max_tokens: positions of a microbatch at most,
    unless a single response is longer. packs: as `ResponseScorer.packs`; groups then stay together where balance and
    `max_tokens` allow it.

    What is one microbatch stays as it is, without a copy.
    """
    whole = Microbatch(torch.arange(len(batch)), batch)
    if workers * microbatches == 1 and max_tokens is None:
        return [[whole]]
    plan = packed_bins if packs else padded_bins
    bins = plan(batch.tokens, microbatches * workers, max_tokens)
    while max_tokens is not None and any(len(one.rows) > 1 and one.positions > max_tokens for one in bins):
        microbatches += max(1, microbatches // 16)
        bins = plan(batch.tokens, microbatches * workers, max_tokens)
    bins = sorted((one for one in bins if one.rows), key=lambda one: one.positions, reverse=True)
    if workers == 1 and len(bins) == 1:
        return [[whole]]
    dealt: list[list[Microbatch]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for start in range(0, len(bins), workers):
        some = bins[start : start + workers]
        lightest = sorted(range(workers), key=loads.__getitem__)
        for worker, one in zip(lightest, some, strict=False):
            rows = torch.tensor(sorted(one.rows))
            dealt[worker].append(Microbatch(rows, batch[rows]))
            loads[worker] += one.positions
        for worker in lightest[len(some) :]:
            dealt[worker].append(idle(batch))
    return dealt


def assemble(
    shares: Sequence[Sequence[Microbatch]], values: Sequence[Sequence[Tensor]], like: Tensor
) -> Tensor:
    """Put values of microbatches back at their rows of the batch.

    values: [n, R] or [n, R, k] of each; returns [N, R] or [N, R, k]. like: [N, R], of the dtype and on the device that
    the result has.
    """
    together = like.new_zeros((*like.shape, *values[0][0].shape[2:]))
    for share, scored in zip(shares, values, strict=True):
        for piece, own in zip(share, scored, strict=True):
            if not piece.idle:
                together[piece.rows] = own.to(together)
    return together


def share_apart(
    batch: Batch, teaches: Tensor, workers: int, microbatches: int, max_tokens: int | None, packs: bool
) -> list[list[Microbatch]]:
    """As `share_out`, the groups that teach nothing in microbatches of their own, the last ones of every worker.

    teaches: bool [N], rows whose gradient need not be zero. Where there are none, every worker begins with an idle
    microbatch: the optimizer takes its step with the zeros that come of it.
    """
    # Cut apart, a group's prompt would be computed twice.
    groups = torch.isin(batch.group_id[:, 0], batch.group_id[teaches, 0])
    shares: list[list[Microbatch]] = [[] if groups.any() else [idle(batch)] for _ in range(workers)]
    for rows, taught in ((groups.nonzero()[:, 0], True), ((~groups).nonzero()[:, 0], False)):
        if not len(rows):
            continue
        part = batch if len(rows) == len(batch) else batch[rows]
        count = -(-microbatches * len(rows) // len(batch))
        for share, dealt in zip(shares, share_out(part, workers, count, max_tokens, packs), strict=True):
            share += [replace(one, rows=rows[one.rows], teaches=taught) for one in dealt]
    return shares


def idle(batch: Batch) -> Microbatch:
    """One row of a prompt of one token and a response of one, none of it in the loss."""
    empty = batch[:1].apply(lambda values: torch.zeros_like(values[:, -1:]))
    for tokens in (empty.tokens, empty.reference_tokens):
        tokens.prompt_mask = torch.ones_like(tokens.prompt_mask)
        tokens.response_mask = torch.ones_like(tokens.response_mask)
    empty.temperature = torch.ones_like(empty.temperature)
    return Microbatch(torch.zeros(1, dtype=torch.int64), empty, idle=True)
