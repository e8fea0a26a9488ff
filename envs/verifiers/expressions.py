"""Evaluates plain arithmetic exactly with bounded work, and checks targets of number puzzles."""

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from operator import add, mul, sub, truediv

Operation = Callable[[Fraction, Fraction], Fraction]
LARGEST_EXPONENT = 200
"""Maximum decimal exponent of a number; a greater exponent would make the evaluation slow."""
FOUR_OPERATIONS: Mapping[type[ast.operator], Operation] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
EVALUATION_ERRORS = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)
"""Exceptions that `parse_expression` and `evaluate` raise for an expression without a value.

ZeroDivisionError is an ArithmeticError.
"""


def parse_expression(expression: str) -> ast.expr:
    """Parses an expression to its syntax tree.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: The text is not an expression.
    """
    return ast.parse(expression, mode="eval").body


def evaluate(node: ast.expr, operations: Mapping[type[ast.operator], Operation] = FOUR_OPERATIONS) -> Fraction:
    """Returns the exact value of signs and `operations` over decimal numbers.

    Raises:
        ValueError: The expression has another node, such as a power.
        ZeroDivisionError: The expression divides by zero.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if isinstance(node.value, int):
            return Fraction(node.value)
        decimal = Decimal(repr(node.value))
        if not decimal.is_finite() or abs(decimal.adjusted()) > LARGEST_EXPONENT:
            raise ValueError("infinite, or with an exponent beyond all use")
        return Fraction(decimal)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = evaluate(node.operand, operations)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in operations:
        return operations[type(node.op)](evaluate(node.left, operations), evaluate(node.right, operations))
    raise ValueError(f"not allowed: {type(node).__name__}")


def reaches_target(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Whether an expression uses exactly these numbers and has the value of the target.

    The numbers are whole, and each is used as often as it is listed.
    """
    try:
        tree = parse_expression(expression.strip())
        hit = evaluate(tree) == target
    except EVALUATION_ERRORS:
        return False
    used_numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return hit and all(type(number) is int for number in used_numbers) and Counter(used_numbers) == Counter(numbers)
