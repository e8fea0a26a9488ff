"""Countdown: is the last <answer> an expression over exactly the given numbers that makes the target?"""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from envs.verifiers.text import last_tagged

LONGEST_EXPRESSION = 200
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def judge_countdown(text: str, numbers: Sequence[int], target: int) -> dict[str, float]:
    """Parts: accuracy (1 for a right expression), format (1 where there is an <answer> at all)."""
    answer = last_tagged(text, "answer")
    if answer is None:
        return {"accuracy": 0.0, "format": 0.0}
    expression = answer.split("=")[0].replace("×", "*").replace("÷", "/").strip()
    return {"accuracy": float(_makes(expression, numbers, target)), "format": 1.0}


def _makes(expression: str, numbers: Sequence[int], target: int) -> bool:
    if len(expression) > LONGEST_EXPRESSION:
        return False
    used: list[int] = []
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == target and Counter(used) == Counter(numbers)


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """Exact value; the integers met are appended to `used`. Raises ValueError on anything but + - * / ( )."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left, used), _evaluate(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand, used)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(f"{type(node).__name__} is not arithmetic")
