"""Tests of curriculum components on plain numbers, with values computed by hand."""

import math
import random
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest

from config.schema.curriculum import SUCCESS_RULES, CurriculumConfig
from config.schema.errors import ConfigError
from envs.curriculum.levels import OPEN_RULES, Levels, make_levels
from envs.curriculum.priorities import PRIORITY_RULES, source_shares
from envs.curriculum.success_window import SuccessWindow
from envs.curriculum.weighted_sampling import WeightTree
from envs.example import Example


def chi_square_ratio(counts: dict[Any, int], expected: dict[Any, float]) -> float:
    """Returns Pearson's chi-square over its 99.9% point, by the approximation of Wilson and Hilferty.

    A ratio above 1 arises by chance once in 1,000.
    """
    total, degrees = sum(counts.values()), len(expected) - 1
    assert set(counts) <= set(expected)
    square = sum((counts.get(key, 0) - total * share) ** 2 / (total * share) for key, share in expected.items())
    return square / (degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3)


def test_priority_rules() -> None:
    assert set(PRIORITY_RULES) == set(SUCCESS_RULES)
    assert [PRIORITY_RULES["learnability"](p) for p in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.1875, 0.25, 0.0]
    assert [PRIORITY_RULES["failure"](p) for p in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]


def test_shares_follow_the_priorities_above_a_floor() -> None:
    """First case: base weights 3 : 1, priorities 1 : 2, floor 0.1.

    The shares are 0.1 (3/4, 1/4) + 0.9 (3/5, 2/5).
    """
    found = source_shares({"a": 3.0, "b": 1.0}, {"a": 0.1, "b": 0.2}, 0.1)
    assert found == pytest.approx({"a": 0.615, "b": 0.385})
    assert source_shares({"a": 3.0, "b": 1.0}, {"a": 0.0, "b": 0.0}, 0.1) == {"a": 0.75, "b": 0.25}
    assert source_shares({"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, 0.2) == pytest.approx({"a": 0.95, "b": 0.05})
    assert source_shares({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, 1.0) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("weights", [[1.0], [0.0, 2.0, 1.0], [0.5, 0.0, 0.25, 3.0, 0.0, 1.0, 1e-9]])
def test_weight_tree_samples_by_weight(weights: list[float]) -> None:
    tree, rng = WeightTree([0.0] * len(weights)), random.Random(1)
    assert tree.sample_index(rng) is None
    for index, weight in enumerate(weights):
        tree[index] = weight
    assert tree.total == WeightTree(weights).total == pytest.approx(sum(weights))
    counts = Counter(tree.sample_index(rng) for _ in range(20_000))
    assert all(weights[index or 0] for index in counts)
    likely = {index: weight / sum(weights) for index, weight in enumerate(weights) if weight > 1e-6}
    if len(likely) > 1:
        assert chi_square_ratio({index: counts[index] for index in likely}, likely) < 1


def test_a_window_weighs_the_newest_and_forgets_the_rest() -> None:
    window = SuccessWindow(2)
    assert window.mean is None and not window.is_full
    window.add(1.0, 1.0)
    assert window.mean == 1.0 and not window.is_full
    window.add(0.0, 3.0)
    assert window.mean == 0.25 and window.is_full
    window.add(0.5, 1.0)  # (0 x 3 + 0.5 x 1) / 4
    assert window.mean == 0.125
    other = SuccessWindow(2)
    other.load(window.state())
    assert other.mean == 0.125 and other.is_full


def rows(*values: Any) -> list[Example]:
    return [
        Example(({"role": "user", "content": str(row)},), "", row, row_data={"level": value})
        for row, value in enumerate(values)
    ]


@pytest.mark.parametrize(("values", "settings", "levels", "labels"), [
    ((3.0, 1.0, 2.0, 1.0), {}, [2, 0, 1, 0], ["1", "2", "3"]),
    (("Level 10", "Level 9"), {}, [1, 0], ["Level_9", "Level_10"]),
    ((Decimal("0.5"), 0.25, 1), {"order": "descending"}, [1, 2, 0], ["1", "0.5", "0.25"]),
    (("hard", "easy", "easy"), {"order": ["easy", "middling", "hard"]}, [1, 0, 0], ["easy", "hard"]),
    ((1, 2, 3, 4, 5, 6), {"bins": 3}, [0, 0, 1, 1, 2, 2], ["1", "2", "3"]),
    ((1, 2, 3, 4, 5, 6), {"bins": 2, "order": "descending"}, [1, 1, 1, 0, 0, 0], ["1", "2"]),
    ((7, 7, 7, 7, 1, 9), {"bins": 3}, [0, 0, 0, 0, 0, 1], ["1", "2"]),
])  # fmt: skip
def test_levels_of_a_column(
    values: tuple[Any, ...], settings: dict[str, Any], levels: list[int], labels: list[str]
) -> None:
    """Last case: all sevens share the level of the first 7, the lowest third."""
    result = make_levels(rows(*values), "level", CurriculumConfig(column="level", **settings))
    assert (result.row_levels, result.labels) == (levels, labels)


@pytest.mark.parametrize(("values", "settings", "message"), [
    (("easy", "hard"), {}, r"the value 'easy', which contains no number .* \('easy', 'hard'\)"),
    ((1, None), {}, r"column='level' has the value None"),
    ((1, True), {}, r"the value True"),
    ((1, float("nan")), {}, r"the value nan"),
    (("a", "b"), {"order": ["a"]}, r"order=\['a'\] lacks 'b', which column 'level' has \(example 1\)"),
])  # fmt: skip
def test_values_without_a_place(values: tuple[Any, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_levels(rows(*values), "level", CurriculumConfig(column="level", **settings))


def test_a_row_without_the_column_is_named_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match=r"column='grade': .*\(columns: level\)\. Name a column"):
        make_levels(rows(1, 2), "grade", CurriculumConfig(column="grade"))


def levels_of_three(**settings: Any) -> Levels:
    return Levels([0, 1, 2], ["1", "2", "3"], CurriculumConfig(gate=0.5, window=2, **settings))


def test_a_level_opens_when_the_newest_groups_of_the_one_before_pass_the_gate() -> None:
    levels = levels_of_three()
    assert [levels.is_open(row) for row in range(3)] == [True, False, False]
    assert not levels.observe(0, 1.0, 1.0)  # one group of two
    assert not levels.observe(0, 0.0, 2.0)  # (1 + 0) / 3
    assert not levels.observe(0, 0.75, 2.0)  # (0 + 1.5) / 4
    assert levels.observe(0, 0.5, 6.0)  # (1.5 + 3) / 8
    assert levels.newest_level == 1


def test_the_gate_is_reached_exactly() -> None:
    levels = levels_of_three()
    for success in (0.0, 0.25, 0.5):
        assert not levels.observe(0, success, 1.0)
    assert levels.observe(0, 0.5, 1.0)
    assert [levels.is_open(row) for row in range(3)] == [True, True, False]
    # level 0 is not the newest level
    assert not levels.observe(0, 1.0, 1.0) and not levels.observe(0, 1.0, 1.0)
    assert not levels.observe(1, 1.0, 1.0) and levels.observe(1, 0.0, 1.0)
    assert not levels.observe(2, 1.0, 1.0) and not levels.observe(2, 1.0, 1.0)  # no harder level
    assert levels.newest_level == 2


def test_the_newest_level_alone() -> None:
    assert set(OPEN_RULES) == {"reached", "newest"}
    levels = levels_of_three(open="newest")
    levels.observe(0, 1.0, 1.0)
    assert levels.observe(0, 1.0, 1.0)
    assert [levels.is_open(row) for row in range(3)] == [False, True, False]


def test_levels_without_usable_rows_are_skipped() -> None:
    levels = levels_of_three()
    assert levels.move_to_usable_level(lambda row: row == 1) and levels.newest_level == 1
    assert not levels.move_to_usable_level(lambda row: row == 1)
    levels.newest_level = 2
    assert levels.move_to_usable_level(lambda row: row == 1) and (levels.newest_level, levels.hardest_level) == (1, 1)
    nothing = levels_of_three()
    nothing.move_to_usable_level(lambda row: False)
    assert nothing.newest_level == 0
