"""The exact value of an expression of plain arithmetic, with the work that it may cost bounded."""

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from operator import add, mul, sub, truediv

Operation = Callable[[Fraction, Fraction], Fraction]
LARGEST_EXPONENT = 200
"""Of a number with a fraction or an exponent: a greater one would take longer than any use of it is worth."""
FOUR_OPERATIONS: Mapping[type[ast.operator], Operation] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}
NOT_ARITHMETIC = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)
"""What `parse` and `value` raise for an expression without a value; ZeroDivisionError is an ArithmeticError."""


def parse(expression: str) -> ast.expr:
    """The tree of an expression. Raises SyntaxError, ValueError, RecursionError or MemoryError where there is none."""
    return ast.parse(expression, mode="eval").body


def value(node: ast.expr, operations: Mapping[type[ast.operator], Operation] = FOUR_OPERATIONS) -> Fraction:
    """Exact value of signs and `operations` over decimal numbers.

    Raises:
        ValueError: anything else, powers included.
        ZeroDivisionError: a division by zero.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if isinstance(node.value, int):
            return Fraction(node.value)
        decimal = Decimal(repr(node.value))
        if not decimal.is_finite() or abs(decimal.adjusted()) > LARGEST_EXPONENT:
            raise ValueError("infinite, or with an exponent beyond all use")
        return Fraction(decimal)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = value(node.operand, operations)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in operations:
        return operations[type(node.op)](value(node.left, operations), value(node.right, operations))
    raise ValueError(f"not allowed: {type(node).__name__}")


def makes(expression: str, numbers: Sequence[int], wanted: int) -> bool:
    """Whether an expression has exactly these whole numbers, each as often, and exactly this value."""
    try:
        tree = parse(expression.strip())
        hit = value(tree) == wanted
    except NOT_ARITHMETIC:
        return False
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return hit and all(type(number) is int for number in used) and Counter(used) == Counter(numbers)
