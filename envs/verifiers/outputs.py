"""Compares a program's output, or a function's result, with the expected one."""

import math
import sys
from decimal import Decimal, InvalidOperation
from typing import Any

TOLERANCE = 1e-6
"""Tolerance for numbers whose expected form has a fraction or an exponent: absolute up to 1, relative above."""
LONGEST_NUMBER = 64
"""Maximum length of a number; a longer token is compared only as text."""


def same_output(output: str, expected: str) -> bool:
    """Whether a program's output equals the expected output, token by token.

    Surrounding space and blank lines do not count. A whole number must match exactly (`3.0` is 3, 9999 is not
    10000), a number with a fraction within `TOLERANCE`.
    """
    if output.strip() == expected.strip():
        return True
    ours, theirs = (list(filter(None, map(str.split, text.splitlines()))) for text in (output, expected))
    return len(ours) == len(theirs) and all(
        len(mine) == len(their) and all(map(_same_token, mine, their)) for mine, their in zip(ours, theirs, strict=True)
    )


def _same_token(token: str, expected: str) -> bool:
    """Whether two tokens are equal as text or as numbers."""
    if token == expected:
        return True
    ours, theirs = _parse_finite_number(token), _parse_finite_number(expected)
    if ours is None or theirs is None:
        return False
    if expected.lstrip("+-").isdigit():
        return ours == theirs
    return abs(float(ours) - float(theirs)) <= TOLERANCE * max(1.0, abs(float(theirs)))


def _parse_finite_number(token: str) -> Decimal | None:
    """Returns a finite decimal number that a float can hold, or None.

    The token is ASCII without underscores.
    """
    if len(token) > LONGEST_NUMBER or not token.isascii() or "_" in token:
        return None
    try:
        number = Decimal(token)
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < 300 else None


def same_value(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal.

    Numbers with a fraction are equal within `TOLERANCE`; true and false are not numbers.
    """
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in value)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(expected, float) and isinstance(value, int | float):
        if not math.isfinite(expected):
            return value == expected or (math.isnan(expected) and value != value)
        tolerance = TOLERANCE * max(1.0, abs(expected))
        return abs(value) <= sys.float_info.max and abs(value - expected) <= tolerance
    if isinstance(expected, int) and isinstance(value, int | float):
        return value == expected
    return type(value) is type(expected) and bool(value == expected)


def coati_same_output(output: str, expected: str) -> bool:
    """Whether two outputs are equal by the code reward of ColossalChat, which is PRIME's.

    The comparisons, in order: stripped text; stripped lines; lines without the empty ones; one number per line
    within 1e-8 + 1e-5 |expected|. The last one is skipped if every line is a string of digits. The last
    comparison of the original, sets of tokens, is computed there and not used.
    """
    lines = output.splitlines()
    stripped = "\n".join(line.strip() for line in lines).strip()
    if expected.strip() in ("\n".join(lines).strip(), stripped):
        return True
    expected_lines = [line.strip() for line in expected.split("\n") if line]
    if expected_lines in (lines, [line for line in lines if line]):
        return True
    lines = [line for line in lines if line]
    if len(lines) != len(expected_lines) or all(line.isdigit() for line in lines + expected_lines):
        return False
    try:
        pairs = [(float(mine), float(their)) for mine, their in zip(lines, expected_lines, strict=True)]
    except ValueError:
        return False
    return all(mine == their or abs(mine - their) <= 1e-8 + 1e-5 * abs(their) for mine, their in pairs)
