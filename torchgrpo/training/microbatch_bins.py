"""Distributes rows to bins (microbatches) of about equal numbers of positions.

packed: segments (groups, cut if too long) ──▶ the bin with the least load; a prompt counts once per segment
padded: rows sorted by length ──▶ runs; each row counts as much as the longest row of its bin
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torchgrpo.batches.batch import Tokens
from torchgrpo.training.packed_sequence import packed_row_costs

MAX_IMBALANCE = 1.1
"""Load of the largest bin, relative to the smallest possible load, up to which groups are not cut further."""


@dataclass(frozen=True)
class Bin:
    """Rows of one microbatch and the number of positions that the model computes for them."""

    rows: list[int]
    positions: int


def pack_into_bins(tokens: Tokens, count: int, max_tokens: int | None) -> list[Bin]:
    """Distributes packed rows to `count` bins, the longest segments first (Graham 1969).

    Groups stay whole if the bins are balanced; otherwise they are cut into smaller and smaller segments.
    """
    groups, prompts, responses = (each.tolist() for each in packed_row_costs(tokens))
    total = sum(responses) + sum({group: prompts[row] for row, group in enumerate(groups)}.values())
    longest = max(prompt + length for prompt, length in zip(prompts, responses, strict=True))
    least = max(total / count, longest)
    limit, best = total if max_tokens is None else max_tokens, None
    while True:
        segments = _cut_groups(groups, prompts, responses, limit)
        bin_rows: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, index) for index in range(count)]  # heap: each segment goes to the bin with the least load
        for segment in sorted(segments, key=lambda segment: segment.positions, reverse=True):
            load, index = loads[0]
            bin_rows[index] += segment.rows
            heapq.heapreplace(loads, (load + segment.positions, index))
        bins = [Bin(bin_rows[index], load) for load, index in loads]
        largest = max(one.positions for one in bins)
        if best is None or largest < max(one.positions for one in best):
            best = bins
        if largest <= MAX_IMBALANCE * least or len(segments) == len(responses) or limit <= longest:
            return best
        limit = min(limit, max(segment.positions for segment in segments)) // 2


def _cut_groups(groups: Sequence[int], prompts: Sequence[int], responses: Sequence[int], limit: int) -> list[Bin]:
    """Cuts groups into segments of at most `limit` positions, or of a single row.

    groups: index of the prompt of each row. prompts, responses: prompt and response positions of each row.
    """
    segments: list[Bin] = []
    rows: list[int] = []
    positions = 0
    for row, length in enumerate(responses):
        if rows and (groups[rows[0]] != groups[row] or positions + length > limit):
            segments.append(Bin(rows, positions))
            rows = []
        if not rows:
            positions = prompts[row]
        rows = [*rows, row]
        positions += length
    return [*segments, Bin(rows, positions)]


def pad_into_bins(tokens: Tokens, count: int, max_tokens: int | None) -> list[Bin]:
    """Distributes padded rows to at most `count` bins of similar length.

    Rows are padded to the longest row of their bin; the largest bin is as small as possible. `max_tokens`, a
    parameter of `pack_into_bins`, has no effect.
    """
    widths = tokens.prompt_mask.sum(1) + tokens.response_mask.sum(1)
    order = widths.argsort(descending=True, stable=True)
    lengths = widths[order].tolist()
    low, high = 1, lengths[0] * len(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_width_runs(lengths, middle)) <= count else (middle + 1, high)
    return [
        Bin(order[run.start : run.stop].tolist(), lengths[run.start] * len(run)) for run in _width_runs(lengths, low)
    ]


def _width_runs(lengths: Sequence[int], limit: int) -> list[range]:
    """Splits falling row lengths into runs of a padded size up to `limit`.

    A run has at least one row.
    """
    runs: list[range] = []
    start = 0
    while start < len(lengths):
        stop = min(len(lengths), start + max(1, limit // lengths[start]))
        runs.append(range(start, stop))
        start = stop
    return runs
