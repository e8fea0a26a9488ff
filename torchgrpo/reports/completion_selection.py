"""Selects the completions that a report shows with texts or token values.

The selection has the best and the worst completion of each optimizer step, prompts that flipped between wrong and
right, and random groups. Each kind has a share of a budget of bytes. The selection of a run is deterministic.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchgrpo.reports.ledger_columns import Columns

TEXT_BYTES = 5_000_000
"""Maximum size of all texts of completions."""
MAX_TOKENS = 200_000
"""Maximum number of tokens with values, each of about 20 bytes."""
FLIP_SHARE, EXTREME_SHARE, GROUP_SHARE = 0.3, 0.4, 0.3
"""Shares of the bytes for flips, for best and worst completions, and for random groups."""
MAX_OCCURRENCES = 12
"""Maximum number of groups of one prompt over time."""
MAX_TEXT_LENGTH = 6000
"""Maximum characters of a shown completion."""


@dataclass(frozen=True)
class Flip:
    """Prompt whose first group is mostly wrong and last group mostly right, or vice versa.

    first, last: example completions of the first and the last group. intermediate: a completion of each group
    between.
    """

    prompt: int
    set: int
    to_right: bool
    first: int
    last: int
    intermediate: tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """Selected completions of a run.

    completions: numbers of the completions with texts, in order. with_tokens: numbers of the completions with
    token values. flips: flips with selected completions. num_flips: number of all flips.
    """

    completions: np.ndarray
    with_tokens: frozenset[int]
    flips: list[Flip]
    num_flips: int


def _add_within_budget(
    sets: Iterable[tuple[int, ...]], budget: float, sizes: np.ndarray, selection: set[int]
) -> list[int]:
    """Adds complete sets of completions to `selection` within the budget.

    Returns the indices of the added sets.
    """
    added = []
    for index, members in enumerate(sets):
        new = [member for member in members if member not in selection]
        cost = float(sizes[new].sum()) if new else 0.0
        if cost > budget:
            break
        budget -= cost
        selection.update(new)
        added.append(index)
    return added


def select_completions(columns: Columns, steps: np.ndarray) -> Selection:
    """Selects the completions of a report. steps: int [groups], the optimizer step of each group."""
    generator = np.random.default_rng(0)
    characters = np.minimum(columns.completions["characters"], MAX_TEXT_LENGTH)
    sizes, texts = characters + 80, set[int]()  # bytes of a completion: text and other values
    flips = find_flips(columns, steps)
    shuffled_flips = [flips[index] for index in generator.permutation(len(flips))]
    flip_members = ((flip.first, flip.last, *flip.intermediate) for flip in shuffled_flips)
    selected_flips = _add_within_budget(flip_members, FLIP_SHARE * TEXT_BYTES, sizes, texts)
    extremes = find_step_extremes(columns, steps)
    extremes = extremes[generator.permutation(len(extremes))]
    _add_within_budget((tuple(pair) for pair in extremes.tolist()), EXTREME_SHARE * TEXT_BYTES, sizes, texts)
    groups = generator.permutation(len(columns.groups["id"]))
    _add_within_budget((_members(columns, group) for group in groups), GROUP_SHARE * TEXT_BYTES, sizes, texts)
    lengths, tokens = columns.completions["length"], set[int]()
    group_members = (_members(columns, group) for group in groups)
    complete_groups = (members for members in group_members if texts.issuperset(members))
    _add_within_budget(complete_groups, MAX_TOKENS / 2, lengths, tokens)
    pairs = (tuple(pair) for pair in extremes.tolist() if texts.issuperset(pair))
    _add_within_budget(pairs, MAX_TOKENS / 2, lengths, tokens)
    shown_flips = [shuffled_flips[index] for index in selected_flips]
    return Selection(np.array(sorted(texts), dtype=np.int64), frozenset(tokens), shown_flips, len(flips))


def _members(columns: Columns, group: int) -> tuple[int, ...]:
    """Returns the numbers of a group's completions."""
    first = int(columns.groups["first"][group])
    return tuple(range(first, first + int(columns.groups["count"][group])))


def find_step_extremes(columns: Columns, steps: np.ndarray) -> np.ndarray:
    """Returns the completions with the lowest and the highest reward of each optimizer step.

    Returns int [steps, 2]; ties are broken at random.
    """
    candidates = np.flatnonzero(columns.is_training & columns.has_score)
    if not len(candidates):
        return np.zeros((0, 2), dtype=np.int64)
    candidate_steps = steps[columns.completions["group"][candidates]]
    tie_breaks = np.random.default_rng(1).random(len(candidates))
    order = np.lexsort((tie_breaks, columns.completions["score"][candidates], candidate_steps))
    starts = np.flatnonzero(np.diff(candidate_steps[order], prepend=candidate_steps[order[0]] - 1))
    ends = np.append(starts[1:], len(order)) - 1
    return np.stack([candidates[order[starts]], candidates[order[ends]]], axis=1)


def find_flips(columns: Columns, steps: np.ndarray) -> list[Flip]:
    """Finds all prompts whose first and last group differ in being mostly right."""
    groups = columns.groups
    rate = columns.mean_of_groups("success", columns.has_score)
    known = np.flatnonzero(np.isfinite(rate))
    if not len(known):
        return []
    keys = (groups["id"][known], steps[known], groups["prompt"][known], groups["set"][known])
    order = known[np.lexsort(keys)]
    key = groups["set"][order].astype(np.int64) * len(columns.prompts) + groups["prompt"][order]
    starts = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
    ends = np.append(starts[1:], len(order))
    is_right = rate[order] >= 0.5
    flip_indices = np.flatnonzero(is_right[starts] != is_right[ends - 1])
    return [
        _make_flip(columns, order[starts[index] : ends[index]], bool(is_right[ends[index] - 1]))
        for index in flip_indices
    ]


def _make_flip(columns: Columns, occurrences: np.ndarray, to_right: bool) -> Flip:
    """Builds the flip of a prompt. occurrences: the prompt's groups in order of time."""
    intermediate = occurrences[1:-1]
    if len(intermediate) > MAX_OCCURRENCES - 2:
        intermediate = intermediate[np.linspace(0, len(intermediate) - 1, MAX_OCCURRENCES - 2).round().astype(int)]
    return Flip(
        int(columns.groups["prompt"][occurrences[0]]),
        int(columns.groups["set"][occurrences[0]]),
        to_right,
        _find_example(columns, int(occurrences[0]), is_right=not to_right),
        _find_example(columns, int(occurrences[-1]), is_right=to_right),
        tuple(int(columns.groups["first"][group]) for group in intermediate),
    )


def _find_example(columns: Columns, group: int, is_right: bool) -> int:
    """Returns the first completion of a group with the highest or lowest success."""
    members = np.array(_members(columns, group))
    success = np.where(columns.has_score[members], columns.completions["success"][members], np.nan)
    return int(members[np.nanargmax(success) if is_right else np.nanargmin(success)])


def group_steps(columns: Columns, evaluations: list[dict[str, Any]]) -> np.ndarray:
    """Returns the optimizer step of each group: int [groups].

    This is the step that trained on the group, or else the last step of the group's iteration.
    """
    groups = columns.groups
    last_steps: dict[int, int] = {}
    for row in evaluations:
        last_steps[row.get("iteration", 0)] = row["optimizer_step"]
    for iteration, step in zip(groups["iteration"].tolist(), groups["step"].tolist(), strict=True):
        if step >= 0:
            last_steps[iteration] = max(step, last_steps.get(iteration, 0))
    fallback = [last_steps.get(iteration, iteration) for iteration in groups["iteration"].tolist()]
    return np.where(groups["step"] >= 0, groups["step"], np.array(fallback, dtype=np.int64).reshape(-1))
