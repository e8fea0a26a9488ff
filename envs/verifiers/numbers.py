"""Plain numbers in answers: where the final one stands, and when two are the same. No sympy here.

A number is exact: decimals, fractions and mixed numbers become a `Fraction`, so 1,000 is 1000.0 and 3/6 is 0.5,
while 9999 is not 10,000 and 0.333 is not 1/3.
"""

import re
from fractions import Fraction

from envs.verifiers.extract import after_thinking

MAX_CHARACTERS = 400
"""A longer text is no number: reading it would cost more than any answer is worth."""
MAX_WITH_UNIT = 80
"""A longer text is no number with a unit."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"([-+]?)({_DIGITS}?)(?:\.(\d*))?", re.ASCII)
_RATIO = re.compile(rf"([-+]?{_DIGITS}(?:\.\d+)?)\s*/\s*({_DIGITS}(?:\.\d+)?)", re.ASCII)
_FRAC = re.compile(
    r"([-+]?)\s*\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))", re.ASCII
)
_MIXED = re.compile(
    r"([-+]?)(\d+)(?:\s+(\d+)\s*/\s*(\d+)|\s*\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})", re.ASCII
)
_UNIT = re.compile(
    r"(?P<number>.*?[\d.])\s*(?P<unit>[A-Za-z][A-Za-z ./]*?(?:\s*\^?[23])?)\.?", re.ASCII | re.DOTALL
)
_SHORT_UNITS = frozenset(
    (
        *(
            "m",
            "g",
            "s",
            "h",
            "l",
            "v",
            "w",
            "cm",
            "mm",
            "km",
            "kg",
            "mg",
            "ft",
            "in",
            "yd",
            "mi",
            "lb",
            "oz",
            "hr",
        ),
        *("ml", "sq", "pm", "am"),
    )
)
_NOT_UNITS = frozenset(
    (
        *(
            "or",
            "and",
            "to",
            "not",
            "than",
            "if",
            "at",
            "about",
            "between",
            "vs",
            "either",
            "neither",
            "mod",
            "cup",
        ),
        *(
            "dozen",
            "hundred",
            "thousand",
            "million",
            "billion",
            "trillion",
            "half",
            "halves",
            "third",
            "thirds",
        ),
        *(
            "quarter",
            "quarters",
            "pi",
            "sqrt",
            "squared",
            "cubed",
            "plus",
            "minus",
            "times",
            "factorial",
            "more",
        ),
        *("less", "over", "divided", "by", "of"),
    )
)
_QUOTES = " \t\r\n\xa0\u2009\u202f*`'\"“”"

_MARKED = re.compile(r"####([^\n]{0,200})")
_TAGGED = re.compile(r"<answer>([^<]{1,200})</answer>")


def final_number(text: str) -> str | None:
    """The number after the last `####`, or inside the last `<answer>`, behind the thoughts; None without one.

    The marked text must be one number: a currency sign, a percent sign, a unit in words and Markdown around it are
    left away, but "7 or 8", "3:30" and "12 apples and 3 pears" name no number.
    """
    spoken = after_thinking(text)
    found = [] if spoken is None else _MARKED.findall(spoken) or _TAGGED.findall(spoken)
    if not found:
        return None
    number = plain(found[-1])
    return number if parse_number(number) is not None else None


def plain(text: str) -> str:
    """A number's text without Markdown, quotes, currency, percent sign, unit in words or full stop."""
    text = text.strip(_QUOTES).replace("−", "-").replace("\\$", "").replace("$", "").strip(_QUOTES)
    text = text.rstrip(".").replace("\\%", "").rstrip("%").strip(_QUOTES)
    with_unit = _UNIT.fullmatch(text) if len(text) <= MAX_WITH_UNIT else None
    if with_unit and is_unit(with_unit["unit"]):
        return with_unit["number"].strip()
    return text


def is_unit(text: str) -> bool:
    """Whether words behind a number are a unit (`cm^2`, `miles per hour`) and do not change it (`or 8`, `dozen`)."""
    words = re.split(r"[ ./^]+", text.casefold().rstrip("."))
    return not _NOT_UNITS & set(words) and (len(words[0]) > 2 or words[0] in _SHORT_UNITS)


def parse_number(text: str) -> Fraction | None:
    """The exact value of a decimal, a fraction (`a/b`, `\\frac{a}{b}`) or a mixed number; None for anything else.

    Thousands are grouped in threes or not at all, digits are ASCII, and `a/0` is no number.
    """
    text = text.strip().replace("$", "")
    if not text or len(text) > MAX_CHARACTERS:
        return None
    match = _DECIMAL.fullmatch(text)
    if match:
        return _decimal(*match.groups())
    match = _RATIO.fullmatch(text)
    if match:
        top, bottom = parse_number(match[1]), parse_number(match[2])
        return top / bottom if top is not None and bottom else None
    match = _MIXED.fullmatch(text)
    if match:
        part = _ratio("", match[3] or match[5], match[4] or match[6])
        sign = -1 if match[1] == "-" else 1
        return None if part is None else sign * (int(match[2]) + part)
    match = _FRAC.fullmatch(text)
    return _ratio(match[1], match[2] or match[3], match[4] or match[5]) if match else None


def _ratio(sign: str, top: str, bottom: str) -> Fraction | None:
    if not int(bottom):
        return None
    return Fraction(-int(top) if sign == "-" else int(top), int(bottom))


def _decimal(sign: str, whole: str, part: str | None) -> Fraction | None:
    if not whole and not part:
        return None
    digits = whole.replace(",", "") + (part or "")
    value = Fraction(int(digits), 10 ** len(part or ""))
    return -value if sign == "-" else value


def same_number(given: str, gold: str) -> bool:
    """Equal in value: 1,000 is 1000.0. Two texts that are no numbers are never the same."""
    left, right = parse_number(given), parse_number(gold)
    return left is not None and left == right
