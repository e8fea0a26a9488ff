"""Sorts rows into difficulty levels by a column, and opens levels by success."""

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.errors import ConfigError
from envs.curriculum.success_window import SuccessWindow
from envs.example import Example

OPEN_RULES: dict[str, Callable[[int, int], bool]] = {
    "reached": lambda level, newest_level: level <= newest_level,
    "newest": lambda level, newest_level: level == newest_level,
}
"""`env.curriculum.open`: whether a level is open, by its number and the number of the newest level."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MAX_LISTED_VALUES = 10
"""Largest number of column values in a message."""


class Levels:
    """Difficulty levels of one data set, with the recent success on each level.

    Args:
        row_levels: number of each row's level; 0 is the easiest, and every level has rows.
        labels: a name for each level, used in metric names.

    newest_level: the level that opened last. hardest_level: the hardest level that can open.
    """

    def __init__(self, row_levels: Sequence[int], labels: Sequence[str], config: CurriculumConfig) -> None:
        self.row_levels, self.labels = row_levels, labels
        self.gate, self._open_rule = config.gate, OPEN_RULES[config.open]
        self.newest_level, self.hardest_level = 0, len(labels) - 1
        self.success_windows = [SuccessWindow(config.window) for _ in labels]

    def is_open(self, row: int) -> bool:
        """Whether the level of a row is open."""
        return self._open_rule(self.row_levels[row], self.newest_level)

    def observe(self, row: int, success: float, weight: float) -> bool:
        """Adds the success rate of a scored group; returns whether a level opened.

        weight: as in `SuccessWindow.add`.
        """
        level = self.row_levels[row]
        window = self.success_windows[level]
        window.add(success, weight)
        if level != self.newest_level or level == self.hardest_level or not window.is_full:
            return False
        success_rate = window.mean
        if success_rate is None or success_rate < self.gate:
            return False
        self.newest_level += 1
        return True

    def move_to_usable_level(self, accepts_row: Callable[[int], bool]) -> bool:
        """Moves to a level with usable rows; returns whether the newest level changed.

        Harder levels come first, then easier levels.
        """
        before = self.newest_level
        while self.newest_level < self.hardest_level and not self._has_rows(accepts_row):
            self.newest_level += 1
        while self.newest_level and not self._has_rows(accepts_row):
            self.newest_level -= 1
            self.hardest_level = self.newest_level
        return self.newest_level != before

    def _has_rows(self, accepts_row: Callable[[int], bool]) -> bool:
        """Whether the newest level has a usable row.

        The search stops at the first usable row, since the length check of a long row tokenizes text.
        """
        return any(accepts_row(row) for row, level in enumerate(self.row_levels) if level == self.newest_level)

    def state(self) -> dict[str, Any]:
        """Returns the levels and their success for a checkpoint."""
        success = [window.state() for window in self.success_windows]
        return {
            "newest": self.newest_level,
            "last": self.hardest_level,
            "labels": list(self.labels),
            "success": success,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores the levels of a checkpoint; levels match by label if the labels changed."""
        saved_labels = state["labels"]
        if saved_labels == list(self.labels):
            self.newest_level, self.hardest_level = state["newest"], state["last"]
            numbers_now = list(range(len(saved_labels)))
        else:
            reached = saved_labels[: state["newest"] + 1]
            numbers = [number for number, label in enumerate(self.labels) if label in reached]
            self.newest_level, self.hardest_level = max(numbers, default=0), len(self.labels) - 1
            numbers_now = [self.labels.index(label) if label in self.labels else -1 for label in saved_labels]
        for number, window_state in zip(numbers_now, state["success"], strict=True):
            if number >= 0:
                self.success_windows[number].load(window_state)


def make_levels(examples: Sequence[Example], column: str | None, config: CurriculumConfig) -> Levels:
    """Makes the levels of one data set by a column of its rows.

    Without a column all rows are on one level.

    Raises:
        ConfigError: a row lacks the column, or its value cannot be ordered.
    """
    if column is None:
        return Levels([0] * len(examples), ["1"], config)
    values = [_value(example, column) for example in examples]
    if isinstance(config.order, list):
        for row, value in enumerate(values):
            if value not in config.order:
                raise ConfigError(
                    f"env.curriculum.order={config.order!r} lacks {value!r}, which column {column!r} has "
                    f"(example {row}): list every value, easiest first"
                )
        present = [value for value in config.order if value in values]
        return Levels([present.index(value) for value in values], [_label(value) for value in present], config)
    hardness = [_hardness(value, column, values) for value in values]
    if config.order == "descending":
        hardness = [-hard for hard in hardness]
    if config.bins is not None:
        # Equal values share a level: the bin of the first equal row in sorted order.
        first: dict[float, int] = {}
        for rank, hard in enumerate(sorted(hardness)):
            first.setdefault(hard, rank * config.bins // len(hardness))
        numbers = {bin_: number for number, bin_ in enumerate(sorted(set(first.values())))}
        labels = [str(number + 1) for number in range(len(numbers))]
        return Levels([numbers[first[hard]] for hard in hardness], labels, config)
    values_by_hardness = dict(zip(hardness, values, strict=True))
    ranks = {hard: rank for rank, hard in enumerate(sorted(values_by_hardness))}
    return Levels([ranks[hard] for hard in hardness], [_label(values_by_hardness[hard]) for hard in ranks], config)


def _value(example: Example, column: str) -> Any:
    """Returns the value of an example's column. Raises ConfigError if the column is missing."""
    if column not in example.row_data:
        where = f" of {example.source}" if example.source else ""
        raise ConfigError(
            f"env.curriculum.column={column!r}: row {example.row}{where} has no such column (columns: "
            f"{', '.join(sorted(map(str, example.row_data))) or 'none'}). Name a column that every row has"
            + (", or {MEMBER: column} for the members with such a column" if example.source else "")
        )
    return example.row_data[column]


def _hardness(value: Any, column: str, values: Sequence[Any]) -> float:
    """Returns the difficulty of a value: a number, or the first number in a text."""
    number = math.nan
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and (found := _NUMBER.search(value)):
        number = float(found[0])
    if math.isfinite(number):
        return number
    distinct = list(dict.fromkeys(map(repr, values)))
    more = ", ..." if len(distinct) > _MAX_LISTED_VALUES else ""
    raise ConfigError(
        f"env.curriculum.column={column!r} has the value {value!r}, which contains no number to sort by; set "
        "env.curriculum.order to a list of the values, easiest first "
        f"({', '.join(distinct[:_MAX_LISTED_VALUES])}{more})"
    )


def _label(value: Any) -> str:
    """Returns the label of a value for metric names."""
    return f"{value:g}" if isinstance(value, float) else "_".join(str(value).split())
