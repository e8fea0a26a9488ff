"""Tool `calculator`: exact arithmetic, bounded in time and size for any request."""

from envs.verifiers.expressions import EVALUATION_ERRORS, evaluate, parse_expression

MAX_CHARACTERS = 200
"""Largest number of characters in an expression."""
RESULT_BOUND = 10**60
SIGNIFICANT_DIGITS = 12


def calculator(expression: str) -> str:
    """You have a calculator for + - * / and parentheses.

    Whole numbers are exact, other numbers have 12 significant digits. Commas in numbers are dropped. The result of an
    invalid expression is `error: ...`.

    Args:
        expression: numbers, + - * / and parentheses, such as `12*(7+1)`
    """
    text = expression.strip().replace(",", "").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > MAX_CHARACTERS:
        return f"error: longer than {MAX_CHARACTERS} characters"
    try:
        result = evaluate(parse_expression(text))
    except ZeroDivisionError:
        return "error: division by zero"
    except EVALUATION_ERRORS:
        return "error: only + - * / and parentheses over numbers"
    if abs(result) >= RESULT_BOUND:
        return "error: the result is too large"
    if result.denominator == 1:
        return str(result.numerator)
    return f"{float(result):.{SIGNIFICANT_DIGITS}g}"


tool = calculator
