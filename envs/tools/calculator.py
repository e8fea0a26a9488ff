"""The tool `calculator`: exact arithmetic, bounded in time and size whatever the model asks for."""

from envs.verifiers.expressions import NOT_ARITHMETIC, parse, value

LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**60
DIGITS = 12


def calculator(request: str) -> str:
    """You have a calculator for + - * / and parentheses.

    Whole numbers are exact, others have 12 significant digits; commas in numbers are dropped. What is wrong is said in
    the result: `error: ...`.
    """
    text = request.strip().replace(",", "").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > LONGEST:
        return f"error: longer than {LONGEST} characters"
    try:
        result = value(parse(text))
    except ZeroDivisionError:
        return "error: division by zero"
    except NOT_ARITHMETIC:
        return "error: only + - * / and parentheses over numbers"
    if abs(result) >= LARGEST:
        return "error: the result is too large"
    if result.denominator == 1:
        return str(result.numerator)
    return f"{float(result):.{DIGITS}g}"


tool = calculator
