"""Distributes completions to bins (microbatches) of about equal numbers of positions.

packed: segments (groups, cut if too long) ──▶ the bin with the least load; a prompt counts once per segment
padded: completions sorted by length ──▶ runs; each row counts as much as the longest row of its bin

A completion of several token sequences has several rows, which stay together.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchgrpo.batches.batch import Tokens
from torchgrpo.training.packed_sequence import packed_row_costs

MAX_IMBALANCE = 1.1
"""Load of the largest bin, relative to the smallest possible load, up to which groups are not cut further."""


@dataclass(frozen=True)
class Bin:
    """Rows of one microbatch.

    positions: number of positions that the model computes for the rows. completions: number of completions.
    """

    rows: list[int]
    positions: int
    completions: int


@dataclass(frozen=True, slots=True)
class _PackedCompletion:
    """Rows and positions of one packed completion.

    first_prompt, last_prompt: index of the prompts of its first and last row in the packed batch. prompt_positions:
    positions of the first prompt, shared with a completion before it that ends with this prompt.
    """

    rows: range
    first_prompt: int
    last_prompt: int
    prompt_positions: int
    positions: int


def pack_into_bins(tokens: Tokens, completions: Sequence[range], count: int, max_tokens: int | None) -> list[Bin]:
    """Distributes packed completions to `count` bins, the longest segments first (Graham 1969).

    Groups stay whole if the bins are balanced; otherwise they are cut into smaller and smaller segments.

    completions: row numbers of each completion.
    """
    packed = _packed_completions(tokens, completions)
    shared = [later.prompt_positions for one, later in pairwise(packed) if one.last_prompt == later.first_prompt]
    total = sum(one.positions for one in packed) - sum(shared)
    longest = max(one.positions for one in packed)
    least = max(total / count, longest)
    limit, best = total if max_tokens is None else max_tokens, None
    while True:
        segments = _cut_groups(packed, limit)
        parts: list[list[Bin]] = [[] for _ in range(count)]
        loads = [(0, index) for index in range(count)]  # heap: each segment goes to the bin with the least load
        for segment in sorted(segments, key=lambda segment: segment.positions, reverse=True):
            load, index = loads[0]
            parts[index].append(segment)
            heapq.heapreplace(loads, (load + segment.positions, index))
        bins = [
            Bin([row for one in parts[index] for row in one.rows], load, sum(one.completions for one in parts[index]))
            for load, index in loads
        ]
        largest = max(one.positions for one in bins)
        if best is None or largest < max(one.positions for one in best):
            best = bins
        if largest <= MAX_IMBALANCE * least or len(segments) == len(packed) or limit <= longest:
            return best
        limit = min(limit, max(segment.positions for segment in segments)) // 2


def _packed_completions(tokens: Tokens, completions: Sequence[range]) -> list[_PackedCompletion]:
    """Computes the positions of each completion in a packed sequence."""
    indices, prompts, responses = (each.tolist() for each in packed_row_costs(tokens))
    packed = []
    for rows in completions:
        prompt_of = {indices[row]: prompts[row] for row in rows}
        positions = sum(prompt_of.values()) + sum(responses[row] for row in rows)
        packed.append(_PackedCompletion(rows, indices[rows[0]], indices[rows[-1]], prompts[rows[0]], positions))
    return packed


def _cut_groups(completions: Sequence[_PackedCompletion], limit: int) -> list[Bin]:
    """Cuts groups into segments of at most `limit` positions, or of a single completion."""
    segments: list[Bin] = []
    last_prompt = None
    for one in completions:
        if one.first_prompt == last_prompt:
            before = segments[-1]
            positions = before.positions + one.positions - one.prompt_positions
            if positions <= limit:
                segments[-1] = Bin([*before.rows, *one.rows], positions, before.completions + 1)
                last_prompt = one.last_prompt
                continue
        segments.append(Bin([*one.rows], one.positions, 1))
        last_prompt = one.last_prompt
    return segments


def pad_into_bins(tokens: Tokens, completions: Sequence[range], count: int, max_tokens: int | None) -> list[Bin]:
    """Distributes padded completions to at most `count` bins of rows of similar length.

    Rows are padded to the longest row of their bin; the largest bin is as small as possible. `max_tokens`, a
    parameter of `pack_into_bins`, has no effect.

    completions: row numbers of each completion.
    """
    widths = (tokens.prompt_mask.sum(1) + tokens.response_mask.sum(1)).tolist()
    longest = [max(widths[row] for row in rows) for rows in completions]
    order = sorted(range(len(completions)), key=longest.__getitem__, reverse=True)
    lengths = [longest[index] for index in order]
    ends = [0, *accumulate(len(completions[index]) for index in order)]  # rows before each completion in this order
    low, high = 1, lengths[0] * ends[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_width_runs(lengths, ends, middle)) <= count else (middle + 1, high)
    return [
        Bin(
            [row for index in order[run.start : run.stop] for row in completions[index]],
            lengths[run.start] * (ends[run.stop] - ends[run.start]),
            len(run),
        )
        for run in _width_runs(lengths, ends, low)
    ]


def _width_runs(lengths: Sequence[int], ends: Sequence[int], limit: int) -> list[range]:
    """Splits completions of falling length into runs of a padded size up to `limit`.

    A run has at least one completion. ends: number of rows before each completion, and of all rows.
    """
    runs: list[range] = []
    start = 0
    while start < len(lengths):
        stop = bisect_right(ends, ends[start] + limit // lengths[start]) - 1
        stop = max(stop, start + 1)
        runs.append(range(start, stop))
        start = stop
    return runs
