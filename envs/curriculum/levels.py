"""Levels of difficulty, which open one after the other: each when the one before it is mastered."""

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.errors import ConfigError
from envs.curriculum.window import Window
from envs.example import Example

OPEN: dict[str, Callable[[int, int], bool]] = {
    "reached": lambda level, newest: level <= newest,
    "newest": lambda level, newest: level == newest,
}
"""`env.curriculum.open`: whether a level is drawn from, by its number and that of the newest."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LISTED = 10
"""Values of a column that a message names."""


class Levels:
    """Which rows may be drawn now.

    Args:
        of_rows: number of each row's level, the easiest is 0; every level has rows.
        labels: a name for each level.

    newest: the level that opened last. last: the hardest that can open.
    """

    def __init__(self, of_rows: Sequence[int], labels: Sequence[str], config: CurriculumConfig) -> None:
        self.of_rows, self.labels = of_rows, labels
        self.gate, self._is_open = config.gate, OPEN[config.open]
        self.newest, self.last = 0, len(labels) - 1
        self.success = [Window(config.window) for _ in labels]

    def is_open(self, row: int) -> bool:
        return self._is_open(self.of_rows[row], self.newest)

    def observe(self, row: int, success: float, weight: float) -> bool:
        """One more group; whether it opened a level. weight: as in `Window.add`."""
        level = self.of_rows[row]
        window = self.success[level]
        window.add(success, weight)
        if level != self.newest or level == self.last or not window.full:
            return False
        success_rate = window.mean
        if success_rate is None or success_rate < self.gate:
            return False
        self.newest += 1
        return True

    def settle(self, can_be_asked: Callable[[int], bool]) -> bool:
        """Move to a level with usable rows; return whether the level changed.

        Harder levels come first, then easier ones.
        """
        before = self.newest
        while self.newest < self.last and not self._has_rows(can_be_asked):
            self.newest += 1
        while self.newest and not self._has_rows(can_be_asked):
            self.newest -= 1
            self.last = self.newest
        return self.newest != before

    def _has_rows(self, can_be_asked: Callable[[int], bool]) -> bool:
        """Asks only until one can: that a row is too long costs its tokens to find out."""
        return any(can_be_asked(row) for row, level in enumerate(self.of_rows) if level == self.newest)

    def state(self) -> dict[str, Any]:
        success = [window.state() for window in self.success]
        return {"newest": self.newest, "last": self.last, "labels": list(self.labels), "success": success}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the levels; of changed ones those whose labels are still there."""
        before = state["labels"]
        if before == list(self.labels):
            self.newest, self.last = state["newest"], state["last"]
            of_now = list(range(len(before)))
        else:
            reached = before[: state["newest"] + 1]
            numbers = [number for number, label in enumerate(self.labels) if label in reached]
            self.newest, self.last = max(numbers, default=0), len(self.labels) - 1
            of_now = [self.labels.index(label) if label in self.labels else -1 for label in before]
        for number, saved in zip(of_now, state["success"], strict=True):
            if number >= 0:
                self.success[number].load(saved)


def make_levels(examples: Sequence[Example], column: str | None, config: CurriculumConfig) -> Levels:
    """The levels of one data set, by a column of its rows; one level without a column.

    Raises:
        ConfigError: a row without the column, or with a value that has no place in the order.
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
        there = [value for value in config.order if value in values]
        return Levels([there.index(value) for value in values], [_label(value) for value in there], config)
    hardness = [_hardness(value, column, values) for value in values]
    if config.order == "descending":
        hardness = [-hard for hard in hardness]
    if config.bins is not None:
        # Equal values share a level: that of the first of them among all rows in order.
        first: dict[float, int] = {}
        for rank, hard in enumerate(sorted(hardness)):
            first.setdefault(hard, rank * config.bins // len(hardness))
        numbers = {bin_: number for number, bin_ in enumerate(sorted(set(first.values())))}
        labels = [str(number + 1) for number in range(len(numbers))]
        return Levels([numbers[first[hard]] for hard in hardness], labels, config)
    found = dict(zip(hardness, values, strict=True))
    places = {hard: place for place, hard in enumerate(sorted(found))}
    return Levels([places[hard] for hard in hardness], [_label(found[hard]) for hard in places], config)


def _value(example: Example, column: str) -> Any:
    if column not in example.row_data:
        where = f" of {example.source}" if example.source else ""
        raise ConfigError(
            f"env.curriculum.column={column!r}: row {example.row}{where} has no such column; it has "
            f"{', '.join(sorted(map(str, example.row_data))) or 'none'}. Name one that every row has"
            + (", or {MEMBER: column} for the members that have one" if example.source else "")
        )
    return example.row_data[column]


def _hardness(value: Any, column: str, values: Sequence[Any]) -> float:
    """A number, or the first one in a text such as `Level 3`."""
    number = math.nan
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and (found := _NUMBER.search(value)):
        number = float(found[0])
    if math.isfinite(number):
        return number
    distinct = list(dict.fromkeys(map(repr, values)))
    more = ", ..." if len(distinct) > _LISTED else ""
    raise ConfigError(
        f"env.curriculum.column={column!r} has the value {value!r}, in which there is no number to sort by: give "
        f"env.curriculum.order a list of the values, easiest first ({', '.join(distinct[:_LISTED])}{more})"
    )


def _label(value: Any) -> str:
    """In the name of a metric."""
    return f"{value:g}" if isinstance(value, float) else "_".join(str(value).split())
