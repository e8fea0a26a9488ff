"""Arithmetic that a model may ask for: exact, and bounded in time and size whatever is asked."""

import ast
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from operator import add, mul, sub, truediv

LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**60
DIGITS = 12

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}


def calculator(request: str) -> str:
    """You have a calculator for + - * / and parentheses."""
    return calculate(request)


def calculate(expression: str) -> str:
    """The value of + - * / and parentheses over decimal numbers; commas in numbers are dropped.

    Whole numbers exactly, others to 12 significant digits. What is wrong is said in the result: `error: ...`.
    """
    text = expression.strip().replace(",", "").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > LONGEST:
        return f"error: longer than {LONGEST} characters"
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, InvalidOperation, RecursionError, MemoryError):
        return "error: only + - * / and parentheses over numbers"
    if abs(value) >= LARGEST:
        return "error: the result is too large"
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DIGITS}g}"


def _evaluate(node: ast.expr) -> Fraction:
    """Raises ValueError for anything but the four operations on numbers."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Decimal(repr(node.value))
        if not value.is_finite() or abs(value.adjusted()) > LONGEST:
            raise ValueError("infinite, or with an exponent beyond all use")
        return Fraction(value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _evaluate(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(f"not allowed: {type(node).__name__}")
