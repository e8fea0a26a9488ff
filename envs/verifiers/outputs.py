"""Comparison of what a program printed, or a function returned, with what a test expects."""

import math
import sys
from decimal import Decimal, InvalidOperation
from typing import Any

TOLERANCE = 1e-6
"""Of numbers whose expected form has a fraction or an exponent: absolute up to 1, relative above."""
LONGEST_NUMBER = 64
"""Characters; a longer token is compared as text only."""


def same_output(printed: str, expected: str) -> bool:
    """Equal but for surrounding space, else line by line and token by token; blank lines do not count.

    A whole number is matched exactly (`3.0` is 3, 9999 is not 10000); one with a fraction within `TOLERANCE`.
    """
    if printed.strip() == expected.strip():
        return True
    ours, theirs = (list(filter(None, map(str.split, text.splitlines()))) for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(mine) == len(their) and all(map(_same_token, mine, their))
        for mine, their in zip(ours, theirs, strict=True)
    )


def _same_token(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    ours, theirs = _number(printed), _number(expected)
    if ours is None or theirs is None:
        return False
    if expected.lstrip("+-").isdigit():
        return ours == theirs
    return abs(float(ours) - float(theirs)) <= TOLERANCE * max(1.0, abs(float(theirs)))


def _number(token: str) -> Decimal | None:
    """A finite decimal number in ASCII without underscores, of a size that a float can hold."""
    if len(token) > LONGEST_NUMBER or not token.isascii() or "_" in token:
        return None
    try:
        number = Decimal(token)
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < 300 else None


def same_value(value: Any, expected: Any) -> bool:
    """Equality of JSON values; numbers with a fraction within `TOLERANCE`; true and false are no numbers."""
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in value)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(expected, float) and isinstance(value, int | float):
        if not math.isfinite(expected):
            return value == expected or (math.isnan(expected) and value != value)
        near = TOLERANCE * max(1.0, abs(expected))
        return abs(value) <= sys.float_info.max and abs(value - expected) <= near
    if isinstance(expected, int) and isinstance(value, int | float):
        return value == expected
    return type(value) is type(expected) and bool(value == expected)


def coati_same_output(printed: str, expected: str) -> bool:
    """The ladder of ColossalChat's code reward, which is PRIME's: stripped text; stripped lines; lines without the
    empty ones; then, unless every line is a string of digits, one number a line within 1e-8 + 1e-5 |expected|.

    Its last rung, sets of tokens, is computed there and not used.
    """
    lines = printed.splitlines()
    stripped = "\n".join(line.strip() for line in lines).strip()
    if expected.strip() in ("\n".join(lines).strip(), stripped):
        return True
    wanted = [line.strip() for line in expected.split("\n") if line]
    if wanted in (lines, [line for line in lines if line]):
        return True
    lines = [line for line in lines if line]
    if len(lines) != len(wanted) or all(line.isdigit() for line in lines + wanted):
        return False
    try:
        pairs = [(float(mine), float(their)) for mine, their in zip(lines, wanted, strict=True)]
    except ValueError:
        return False
    return all(mine == their or abs(mine - their) <= 1e-8 + 1e-5 * abs(their) for mine, their in pairs)
