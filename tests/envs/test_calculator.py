"""Tests of the tool `calculator`: results, error messages and bounds."""

import pytest

from envs.tools.builtin.calculator import calculator


@pytest.mark.parametrize(("expression", "result"), [
    ("12*7", "84"), (" 1,234 + 1 ", "1235"), ("0.1+0.2", "0.3"), ("1/3", "0.333333333333"),
    ("-(3-5)*+2", "4"), ("6 ÷ 4 × 2", "3"), ("7/2", "3.5"), ("1/0", "error: division by zero"),
    ("", "error: only + - * / and parentheses over numbers"),
    ("2^10", "error: only + - * / and parentheses over numbers"),
    ("9**9**9", "error: only + - * / and parentheses over numbers"),
    ("__import__('os').getpid()", "error: only + - * / and parentheses over numbers"),
    ("True+1", "error: only + - * / and parentheses over numbers"),
    ("1e999", "error: only + - * / and parentheses over numbers"),
    ("1e40*1e40", "error: the result is too large"),
    ("*".join(["1e199"] * 33), "error: the result is too large"),
    ("1+" * 200 + "1", "error: longer than 200 characters"),
])  # fmt: skip
def test_results_and_errors(expression: str, result: str) -> None:
    assert calculator(expression) == result


def test_deep_nesting_is_bounded() -> None:
    assert calculator("(" * 99 + "1" + ")" * 99) == "1"
    assert calculator("-" * 199 + "1") == "-1"
