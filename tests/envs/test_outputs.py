"""Tests the comparison of program outputs and of function results."""

from typing import Any

import pytest

from envs.verifiers.outputs import coati_same_output, same_output, same_value


@pytest.mark.parametrize(("output", "expected", "is_same"), [
    ("3", "3\n", True), ("  3 \n\n", "3", True), ("1  2\r\n3 \n", "1 2\n3\n", True),
    ("1\n\n2\n", "1\n2\n", True), ("3.0", "3", True), ("1e2", "100", True), ("0.333333", "0.3333333", True),
    ("1000000.5", "1000000.9", True), ("0.33", "0.3333333", False), ("1.0000021", "1.0", False),
    ("9999", "10000", False), ("1000000007", "1000000008", False), ("1000000007.5", "1000000007", False),
    ("100000000000000000000000001", "100000000000000000000000002", False), ("1 2 3", "1\n2\n3", False),
    ("3\n1\n2", "1\n2\n3", False), ("3 4", "3", False), ("", "3", False), ("3", "", False),
    ("yes", "YES", False), ("nan", "0.5", False), ("inf", "1e400", False), ("1_0", "10", False),
    ("٣", "3", False), ("3" * 10**6, "3", False), ("1e999999999", "0.5", False),
])  # fmt: skip
def test_printed_text_is_compared_by_token(output: str, expected: str, is_same: bool) -> None:
    assert same_output(output, expected) == is_same


@pytest.mark.parametrize(("value", "expected", "is_same"), [
    ([1, [2, None]], [1, [2, None]], True), (0.1 + 0.2, 0.3, True), (3, 3.0, True), (3.0, 3, True),
    ({"a": 1.0000001}, {"a": 1.0}, True), (float("nan"), float("nan"), True),
    (float("inf"), float("inf"), True), (10**400, 1.5, False), (4, 3, False), (True, 1, False),
    (1, True, False), ("3", 3, False), ([3], 3, False), ([1, 2], [2, 1], False),
    ({"a": 1, "b": 2}, {"a": 1}, False), (None, False, False),
])  # fmt: skip
def test_results_are_compared_by_value(value: Any, expected: Any, is_same: bool) -> None:
    assert same_value(value, expected) == is_same


def test_coati_comparison_is_coarser() -> None:
    assert coati_same_output("1.00001", "1.0")
    assert not same_output("1.00001", "1.0")
    assert not coati_same_output("3.0 4.0", "3 4")
    assert not coati_same_output("1e400", "x")
