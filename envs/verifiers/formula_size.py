"""Checks that a formula's text is small enough for sympy to parse.

The limits reject what a model writes by accident or to cheat: power towers, huge factorials, sums over a
billion terms. The deadline of the worker process bounds the rest.
"""

import math
import re
from itertools import accumulate

MAX_CHARACTERS = 300
MAX_DEPTH = 12
MAX_DIGITS = 60
"""Maximum number of digits of one number."""
MAX_EXPONENT = 3000
"""Maximum exponent, multiplied by the exponents of the enclosing brackets."""
MAX_FACTORIAL = 200

_FORBIDDEN = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|limsup|liminf|bigcup|bigcap|infty|gcd|mod|pmod|bmod|Gamma|zeta)(?![a-zA-Z])"
    r"|\\(?:begin|boxed|text|dots|ldots|cdots|pm|mp|cup|cap|in|circ|overline|underline|angle|triangle|approx|sim|equiv)(?![a-zA-Z])"
    r"|\d_|[\d.]E[-+]*\d|!!|\^-?\w+\s*!|[\])}]\s*!|(?<![_\d])\d+\s+\d|[?:;\"'`@#~&]"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_IN_EXPONENT = re.compile(r"!|binom|[\d)}]\s*\^|\^[^^]*\^")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_BINOMIAL = re.compile(r"binom(?!\{(?:[a-z]|\d{1,2})\}\{(?:[a-z]|\d{1,2})\})|choose")
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[a-zA-Z]{3,}")
_FUNCTIONS = frozenset(("sin", "cos", "tan", "log", "sqrt", "exp", "sec", "csc", "cot"))


def is_bounded(text: str) -> bool:
    """Whether a canonical text is short, shallow and small enough to be parsed."""
    if len(text) > MAX_CHARACTERS or not text.isascii() or _FORBIDDEN.search(text):
        return False
    depths = accumulate(((character in "({[") - (character in ")}]") for character in text), initial=0)
    if max(depths) > MAX_DEPTH or any(len(number) > MAX_DIGITS for number in _NUMBER.findall(text)):
        return False
    if any(int(number) > MAX_FACTORIAL for number in _FACTORIAL.findall(text)) or _BINOMIAL.search(text):
        return False
    letters = _COMMAND.sub(" ", text)
    if any(word not in _FUNCTIONS for word in _WORD.findall(letters)):
        return False
    return _largest_exponent(text) <= MAX_EXPONENT


def _largest_exponent(text: str) -> int:
    """Returns the largest numeric exponent, multiplied by the exponents on brackets.

    The result exceeds `MAX_EXPONENT` if an exponent is itself a power.
    """
    largest, on_brackets = 1, 1
    for position, character in enumerate(text):
        if character != "^":
            continue
        exponent, end = _read_argument(text, position + 1)
        if _IN_EXPONENT.search(exponent) or text[end : end + 1] == "^":
            return MAX_EXPONENT + 1
        size = math.prod(max(1, int(number)) for number in _NUMBER.findall(exponent))
        if text[position - 1 : position] in (")", "}", "]"):
            on_brackets *= size
        else:
            largest = max(largest, size)
    return largest * on_brackets


def _read_argument(text: str, start: int) -> tuple[str, int]:
    """Returns the exponent that begins at `start`, and its end position.

    The exponent is a group in braces or brackets, or a single number, letter or command.
    """
    if text[start : start + 1] not in ("{", "("):
        found = re.compile(r"-?(?:\d+|\\?[a-zA-Z]+)?").match(text, start)
        end = found.end() if found else start
        return text[start:end], end
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] in "({") - (text[end] in ")}")
        if depth == 0:
            return text[start : end + 1], end + 1
    return "^^", len(text)
