"""Which completions a report holds with their texts, and which with values for each token: a run has too many.

The best and the worst of each step, what flipped between wrong and right, and whole groups at random, each within its
share of a budget of bytes; the same ones each time that the report of a run is made.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchgrpo.reports.columns import Columns

TEXT_BYTES = 5_000_000
"""Of all texts of completions."""
TOKENS = 200_000
"""With values of their own, which take about 20 bytes each."""
FLIPPED, EXTREME, WHOLE = 0.3, 0.4, 0.3
"""Shares of the bytes: what flipped, the best and the worst, whole groups."""
MOST_OCCURRENCES = 12
"""Of one prompt over time."""
LONGEST_TEXT = 6000
"""Characters of a completion that are shown."""


@dataclass(frozen=True)
class Flip:
    """A prompt whose first group was mostly wrong and whose last is mostly right, or the other way round.

    first, last: the completions that show it. others: one for each occurrence between.
    """

    prompt: int
    set: int
    to_right: bool
    first: int
    last: int
    others: tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """completions: numbers of those with their text, in order. with_tokens: of these, those with values for each token.
    flips: those that are among them. all_flips: how many there were."""

    completions: np.ndarray
    with_tokens: frozenset[int]
    flips: list[Flip]
    all_flips: int


def _take(families: Iterable[tuple[int, ...]], room: float, sizes: np.ndarray, taken: set[int]) -> list[int]:
    """Add families to `taken`, each whole, while there is room; the numbers of those that were."""
    kept = []
    for number, family in enumerate(families):
        new = [one for one in family if one not in taken]
        cost = float(sizes[new].sum()) if new else 0.0
        if cost > room:
            break
        room -= cost
        taken.update(new)
        kept.append(number)
    return kept


def select(columns: Columns, steps: np.ndarray) -> Selection:
    """Choose. steps: int [groups], the optimizer step that each group stands at."""
    generator = np.random.default_rng(0)
    characters = np.minimum(columns.completions["characters"], LONGEST_TEXT)
    sizes, texts = characters + 80, set[int]()  # bytes of a completion with what is beside its text
    found = flips(columns, steps)
    order = generator.permutation(len(found))
    shuffled = [found[index] for index in order]
    shows = ((flip.first, flip.last, *flip.others) for flip in shuffled)
    kept = _take(shows, FLIPPED * TEXT_BYTES, sizes, texts)
    extremes = extremes_of_steps(columns, steps)
    extremes = extremes[generator.permutation(len(extremes))]
    _take((tuple(pair) for pair in extremes.tolist()), EXTREME * TEXT_BYTES, sizes, texts)
    groups = generator.permutation(len(columns.groups["id"]))
    _take((_members(columns, group) for group in groups), WHOLE * TEXT_BYTES, sizes, texts)
    lengths, tokens = columns.completions["length"], set[int]()
    whole = (_members(columns, group) for group in groups)
    _take((family for family in whole if texts.issuperset(family)), TOKENS / 2, lengths, tokens)
    pairs = (tuple(pair) for pair in extremes.tolist() if texts.issuperset(pair))
    _take(pairs, TOKENS / 2, lengths, tokens)
    shown = [shuffled[number] for number in kept]
    return Selection(np.array(sorted(texts), dtype=np.int64), frozenset(tokens), shown, len(found))


def _members(columns: Columns, group: int) -> tuple[int, ...]:
    first = int(columns.groups["first"][group])
    return tuple(range(first, first + int(columns.groups["count"][group])))


def extremes_of_steps(columns: Columns, steps: np.ndarray) -> np.ndarray:
    """int [steps, 2]: the completion with the lowest and the one with the highest reward that each step was given."""
    mine = np.flatnonzero(columns.training & columns.judged)
    if not len(mine):
        return np.zeros((0, 2), dtype=np.int64)
    at = steps[columns.completions["group"][mine]]
    chance = np.random.default_rng(1).random(len(mine))  # among equals
    order = np.lexsort((chance, columns.completions["score"][mine], at))
    starts = np.flatnonzero(np.diff(at[order], prepend=at[order[0]] - 1))
    ends = np.append(starts[1:], len(order)) - 1
    return np.stack([mine[order[starts]], mine[order[ends]]], axis=1)


def flips(columns: Columns, steps: np.ndarray) -> list[Flip]:
    """Every prompt whose first and last group differ in what most of their completions are, right or wrong."""
    groups = columns.groups
    rate = columns.mean_of_groups("success", columns.judged)
    known = np.flatnonzero(np.isfinite(rate))
    if not len(known):
        return []
    keys = (groups["id"][known], steps[known], groups["prompt"][known], groups["set"][known])
    order = known[np.lexsort(keys)]
    key = groups["set"][order].astype(np.int64) * len(columns.prompts) + groups["prompt"][order]
    starts = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
    ends = np.append(starts[1:], len(order))
    right = rate[order] >= 0.5
    flipped = np.flatnonzero(right[starts] != right[ends - 1])
    return [_flip(columns, order[starts[each] : ends[each]], bool(right[ends[each] - 1])) for each in flipped]


def _flip(columns: Columns, occurrences: np.ndarray, to_right: bool) -> Flip:
    """occurrences: the prompt's groups over time."""
    between = occurrences[1:-1]
    if len(between) > MOST_OCCURRENCES - 2:
        between = between[np.linspace(0, len(between) - 1, MOST_OCCURRENCES - 2).round().astype(int)]
    return Flip(
        int(columns.groups["prompt"][occurrences[0]]),
        int(columns.groups["set"][occurrences[0]]),
        to_right,
        _example(columns, int(occurrences[0]), right=not to_right),
        _example(columns, int(occurrences[-1]), right=to_right),
        tuple(int(columns.groups["first"][group]) for group in between),
    )


def _example(columns: Columns, group: int, right: bool) -> int:
    """The first of a group's completions that is the most right, or the most wrong."""
    members = np.array(_members(columns, group))
    success = np.where(columns.judged[members], columns.completions["success"][members], np.nan)
    return int(members[np.nanargmax(success) if right else np.nanargmin(success)])


def steps_of_groups(columns: Columns, evaluations: list[dict[str, Any]]) -> np.ndarray:
    """int [groups]: the optimizer step that trained on each; of others, the last step of their iteration."""
    groups = columns.groups
    last: dict[int, int] = {}
    for row in evaluations:
        last[row.get("iteration", 0)] = row["optimizer_step"]
    for iteration, step in zip(groups["iteration"].tolist(), groups["step"].tolist(), strict=True):
        if step >= 0:
            last[iteration] = max(step, last.get(iteration, 0))
    instead = [last.get(iteration, iteration) for iteration in groups["iteration"].tolist()]
    return np.where(groups["step"] >= 0, groups["step"], np.array(instead, dtype=np.int64).reshape(-1))
