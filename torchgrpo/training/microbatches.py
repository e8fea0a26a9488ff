"""Partitions a batch into microbatches of each worker, and reassembles their results by row.

    batch ──microbatch_bins.py──▶ bins of about equal positions ──▶ [worker][microbatch]

Microbatches fit into memory. All workers get the same number of microbatches, since their collective
operations must match; a worker without rows left gets an idle microbatch. The largest microbatches come
first, so that a lack of memory shows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgrpo.batches.batch import Batch
from torchgrpo.training.microbatch_bins import pack_into_bins, pad_into_bins


@dataclass(frozen=True)
class Microbatch:
    """Completions that go through the model together, with all their rows.

    rows: int64 [n], positions of the rows in the batch. idle: the rows belong to no completion of the batch.
    has_gradient: the gradient of at least one row may be nonzero.
    """

    rows: Tensor
    batch: Batch
    idle: bool = False
    has_gradient: bool = True


def partition_rows(
    batch: Batch, workers: int, microbatches: int, max_tokens: int | None, packs: bool
) -> list[list[Microbatch]]:
    """Partitions a batch into the microbatches of each worker, [workers][count], balanced by positions.

    Every row of the batch is in one microbatch, together with the other rows of its completion. A batch that is a
    single microbatch is not copied.

    microbatches: number of each worker, increased where `max_tokens` requires it. max_tokens: largest number
    of positions in a microbatch, exceeded by a longer completion only. packs: as `ResponseScorer.packs`; groups
    then stay together where balance and `max_tokens` allow.
    """
    single = Microbatch(torch.arange(len(batch)), batch)
    if workers * microbatches == 1 and max_tokens is None:
        return [[single]]
    plan, episodes = pack_into_bins if packs else pad_into_bins, batch.episode_rows
    completions = [range(row, row + 1) for row in range(len(batch))] if episodes is None else episodes.ranges
    bins = plan(batch.tokens, completions, microbatches * workers, max_tokens)
    while max_tokens is not None and any(one.completions > 1 and one.positions > max_tokens for one in bins):
        microbatches += max(1, microbatches // 16)
        bins = plan(batch.tokens, completions, microbatches * workers, max_tokens)
    bins = sorted((one for one in bins if one.rows), key=lambda one: one.positions, reverse=True)
    if workers == 1 and len(bins) == 1:
        return [[single]]
    shares: list[list[Microbatch]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for start in range(0, len(bins), workers):
        next_bins = bins[start : start + workers]
        lightest = sorted(range(workers), key=loads.__getitem__)
        for worker, one in zip(lightest, next_bins, strict=False):
            rows = torch.tensor(sorted(one.rows))
            shares[worker].append(Microbatch(rows, batch[rows]))
            loads[worker] += one.positions
        for worker in lightest[len(next_bins) :]:
            shares[worker].append(idle_microbatch(batch))
    return shares


def assemble_rows(shares: Sequence[Sequence[Microbatch]], values: Sequence[Sequence[Tensor]], like: Tensor) -> Tensor:
    """Puts values of microbatches back at their rows of the batch.

    values: [n, R] or [n, R, k] of each microbatch; returns [N, R] or [N, R, k]. like: [N, R], has dtype and
    device of the result.
    """
    result = like.new_zeros((*like.shape, *values[0][0].shape[2:]))
    for share, scored in zip(shares, values, strict=True):
        for microbatch, own in zip(share, scored, strict=True):
            if not microbatch.idle:
                result[microbatch.rows] = own.to(result)
    return result


def partition_by_gradient(
    batch: Batch, has_gradient: Tensor, workers: int, microbatches: int, max_tokens: int | None, packs: bool
) -> list[list[Microbatch]]:
    """Partitions a batch as `partition_rows`, with groups without a gradient in microbatches of their own.

    These microbatches are the last of every worker. has_gradient: bool [N], rows whose gradient may be
    nonzero. Without any such row, every worker begins with an idle microbatch, whose zero gradients are the
    input of the optimizer step.
    """
    # Groups stay whole: the prompt of a divided group would be computed twice.
    groups = torch.isin(batch.group_id[:, 0], batch.group_id[has_gradient, 0])
    shares: list[list[Microbatch]] = [[] if groups.any() else [idle_microbatch(batch)] for _ in range(workers)]
    for rows, trains in ((groups.nonzero()[:, 0], True), ((~groups).nonzero()[:, 0], False)):
        if not len(rows):
            continue
        subset = batch if len(rows) == len(batch) else batch[rows]
        count = -(-microbatches * len(rows) // len(batch))
        for share, dealt in zip(shares, partition_rows(subset, workers, count, max_tokens, packs), strict=True):
            share += [replace(one, rows=rows[one.rows], has_gradient=trains) for one in dealt]
    return shares


def idle_microbatch(batch: Batch) -> Microbatch:
    """Builds a microbatch of one row without loss.

    The row has a prompt of one token and a response of one token.
    """
    empty = batch[:1].apply(lambda values: torch.zeros_like(values[:, -1:]))
    for tokens in (empty.tokens, empty.reference_tokens):
        tokens.prompt_mask = torch.ones_like(tokens.prompt_mask)
        tokens.response_mask = torch.ones_like(tokens.response_mask)
    empty.temperature = torch.ones_like(empty.temperature)
    return Microbatch(torch.zeros(1, dtype=torch.int64), empty, idle=True)
