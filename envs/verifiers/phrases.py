"""Answers that are no formulas: the letter of a choice, a time of day, a ratio, the empty set. Pure text, no sympy."""

import re
from fractions import Fraction

_CHOICE = re.compile(r"[A-J]")
_CHOSEN = re.compile(
    r"(?:\\text(?:bf)?\{)?(?:(?:option|choice|answer) (?P<named>[A-J])\b|(?:(?:option|choice|answer) )?"
    r"(?:\((?P<inside>[A-J])\)|(?P<letter>[A-J])[).:]))\}?"
    r"(?:(?:\s|\\ |\\quad)+(?!\s*(?:or|and)\b)[^-+*/=^<>,\s].*)?",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z])[A-J]\)")
_SEVERAL = re.compile(r"[A-H]{2,8}")
_LETTER = r"(?:[A-H]|\([A-H]\))"
_LETTERS = re.compile(rf"{_LETTER}(?:(?:,| and |,? ?and ?){_LETTER})+")
_TIME = re.compile(r"(\d{1,2}(?::\d{2})?) ?([ap])\.? ?m\.?", re.IGNORECASE)
_RATIO = re.compile(r"(\d+)(?::| to )(\d+)", re.ASCII)
_FRACTION = re.compile(r"(\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\}", re.ASCII)
_CLOCK = re.compile(r"\d{1,2}:\d{2}")
_EMPTY = re.compile(
    r"\\emptyset|(?:there (?:is|are) )?no (?:real |integer |such )?(?:solutions?|roots?)|(?:the )?empty set",
    re.IGNORECASE,
)


def same_phrase(given: str, left: str, right: str) -> bool:
    """Whether two answers that are no formulas are the same. given: as written; left, right: canonical."""
    if _CHOICE.fullmatch(right):
        return chosen(given) == right
    if _SEVERAL.fullmatch(right) and _LETTERS.fullmatch(left) and sorted(set(right)) == list(right):
        return sorted(re.findall("[A-H]", left)) == list(right)
    if _EMPTY.fullmatch(right):
        return _EMPTY.fullmatch(left) is not None
    times = [_TIME.fullmatch(text) for text in (left, right)]
    if times[0] and times[1]:
        first, second = ([part.casefold() for part in time.groups()] for time in times if time)
        return first == second
    return _same_ratio(left, right)


def chosen(given: str) -> str | None:
    """The letter of `(B)`, `B)`, `\\textbf{(B)}\\ 12` or `option (b)`; None where none, or a second one, is named."""
    found = _CHOSEN.fullmatch(given.strip(" $.*\n"))
    if found is None:
        return None
    letter = found["named"] or found["inside"] or found["letter"]
    others = _OTHER_CHOICE.findall(given)
    return letter.upper() if len(others) <= 1 else None


def _same_ratio(left: str, right: str) -> bool:
    """`2 to 3` and the fraction in lowest terms are `2:3`; of what may be a time of day, only the former."""
    gold = _RATIO.fullmatch(right)
    if gold is None:
        return False
    if said := _RATIO.fullmatch(left):
        return said.groups() == gold.groups()
    found = _FRACTION.fullmatch(left)
    if found is None or _CLOCK.fullmatch(right) or not int(gold[2]):
        return False
    top, bottom = (part for part in found.groups() if part)
    ratio = Fraction(int(gold[1]), int(gold[2]))
    return (int(top), int(bottom)) == (ratio.numerator, ratio.denominator)
