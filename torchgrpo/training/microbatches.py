"""How the rows of an optimizer step are shared out: to workers, and each worker's to microbatches that fit into memory.

    batch ──parts: groups, cut where they are too long──▶ bins of about equal positions ──▶ [worker][microbatch]

Every worker gets as many microbatches, for what they do together must match; one that has nothing left to do gets an
idle one. The largest come first, which finds out at once whether the memory suffices.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgrpo.batches.batch import Batch, Tokens
from torchgrpo.training.packing import packed_costs

BALANCE = 1.1
"""A bin may hold so much more than the smallest possible before groups are cut for it."""


@dataclass(frozen=True)
class Microbatch:
    """Completions that go through the model together. `rows` [n] int64: their places in the batch.

    idle: they stand for nothing in it. teaches: the gradient of one of them need not be zero.
    """

    rows: Tensor
    batch: Batch
    idle: bool = False
    teaches: bool = True


@dataclass(frozen=True)
class Bin:
    """Rows of one microbatch, and the positions that the model computes for them."""

    rows: list[int]
    positions: int


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
    plan = _packed_bins if packs else _padded_bins
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


def _packed_bins(tokens: Tokens, count: int, max_tokens: int | None) -> list[Bin]:
    """Whole groups if that is balanced, else groups cut finer and finer; the longest first (Graham 1969)."""
    groups, prompts, own = (each.tolist() for each in packed_costs(tokens))
    total = sum(own) + sum({group: prompts[row] for row, group in enumerate(groups)}.values())
    longest = max(prompt + length for prompt, length in zip(prompts, own, strict=True))
    least = max(total / count, longest)
    limit, best = total if max_tokens is None else max_tokens, None
    while True:
        parts = _cut(groups, prompts, own, limit)
        held: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, place) for place in range(count)]  # a heap: each part goes to the bin that holds least
        for part in sorted(parts, key=lambda part: part.positions, reverse=True):
            load, place = loads[0]
            held[place] += part.rows
            heapq.heapreplace(loads, (load + part.positions, place))
        bins = [Bin(held[place], load) for load, place in loads]
        largest = max(one.positions for one in bins)
        if best is None or largest < max(one.positions for one in best):
            best = bins
        if largest <= BALANCE * least or len(parts) == len(own) or limit <= longest:
            return best
        limit = min(limit, max(part.positions for part in parts)) // 2


def _cut(groups: Sequence[int], prompts: Sequence[int], own: Sequence[int], limit: int) -> list[Bin]:
    """Runs of one group's rows with their prompt, of at most `limit` positions or a single row."""
    parts: list[Bin] = []
    rows: list[int] = []
    positions = 0
    for row, length in enumerate(own):
        if rows and (groups[rows[0]] != groups[row] or positions + length > limit):
            parts.append(Bin(rows, positions))
            rows = []
        if not rows:
            positions = prompts[row]
        rows = [*rows, row]
        positions += length
    return [*parts, Bin(rows, positions)]


def _padded_bins(tokens: Tokens, count: int, max_tokens: int | None) -> list[Bin]:
    """At most `count` bins of rows of like length, each padded to its longest, with the least largest bin."""
    widths = tokens.prompt_mask.sum(1) + tokens.response_mask.sum(1)
    order = widths.argsort(descending=True, stable=True)
    lengths = widths[order].tolist()
    low, high = 1, lengths[0] * len(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(lengths, middle)) <= count else (middle + 1, high)
    return [
        Bin(order[run.start : run.stop].tolist(), lengths[run.start] * len(run))
        for run in _runs(lengths, low)
    ]


def _runs(lengths: Sequence[int], limit: int) -> list[range]:
    """Runs of falling lengths, as many as their first fits into `limit`, or one."""
    runs: list[range] = []
    start = 0
    while start < len(lengths):
        stop = min(len(lengths), start + max(1, limit // lengths[start]))
        runs.append(range(start, stop))
        start = stop
    return runs
