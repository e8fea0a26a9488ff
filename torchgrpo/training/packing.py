"""Bins of rows that go through the model together, of about equal numbers of positions.

packed: parts (groups, cut where they are too long) ──▶ the bin that holds least; a prompt counts once in a part
padded: rows sorted by length ──▶ runs; every row counts as much as the longest of its bin
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torchgrpo.batches.batch import Tokens
from torchgrpo.training.packed_sequence import packed_costs

BALANCE = 1.1
"""A bin may hold so much more than the smallest possible before groups are cut for it."""


@dataclass(frozen=True)
class Bin:
    """Rows of one microbatch, and the positions that the model computes for them."""

    rows: list[int]
    positions: int


def packed_bins(tokens: Tokens, count: int, max_tokens: int | None) -> list[Bin]:
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


def padded_bins(tokens: Tokens, count: int, max_tokens: int | None) -> list[Bin]:
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
