"""Compares answers that are not formulas: choices, times of day, ratios, the empty set.

The functions work on text and do not use sympy.
"""

import re
from fractions import Fraction

_CHOICE = re.compile(r"[A-J]")
_CHOICE_CLAIM = re.compile(
    r"(?:\\text(?:bf)?\{)?(?:(?:option|choice|answer) (?P<named>[A-J])\b|(?:(?:option|choice|answer) )?"
    r"(?:\((?P<inside>[A-J])\)|(?P<letter>[A-J])[).:]))\}?"
    r"(?:(?:\s|\\ |\\quad)+(?!\s*(?:or|and)\b)[^-+*/=^<>,\s].*)?",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z])[A-J]\)")
_CHOICE_LETTERS = re.compile(r"[A-H]{2,8}")
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


def same_phrase(final_answer: str, left: str, right: str) -> bool:
    """Whether two answers that are not formulas are the same.

    final_answer: the answer as written.
    left, right: the canonical texts of the final answer and the reference answer.
    """
    if _CHOICE.fullmatch(right):
        return choice_letter(final_answer) == right
    if _CHOICE_LETTERS.fullmatch(right) and _LETTERS.fullmatch(left) and sorted(set(right)) == list(right):
        return sorted(re.findall("[A-H]", left)) == list(right)
    if _EMPTY.fullmatch(right):
        return _EMPTY.fullmatch(left) is not None
    times = [_TIME.fullmatch(text) for text in (left, right)]
    if times[0] and times[1]:
        first, second = ([part.casefold() for part in time.groups()] for time in times if time)
        return first == second
    return _same_ratio(left, right)


def choice_letter(final_answer: str) -> str | None:
    r"""Returns the letter of a choice such as `(B)`, `B)`, `\textbf{(B)}\ 12` or `option (b)`.

    The result is None if the answer names no letter, or a second one.
    """
    found = _CHOICE_CLAIM.fullmatch(final_answer.strip(" $.*\n"))
    if found is None:
        return None
    letter = found["named"] or found["inside"] or found["letter"]
    choices = _OTHER_CHOICE.findall(final_answer)
    return letter.upper() if len(choices) <= 1 else None


def _same_ratio(left: str, right: str) -> bool:
    """Whether an answer is the ratio of the reference answer.

    `2 to 3` and the fraction in lowest terms are `2:3`. If the reference may be a time of day, the fraction
    does not count.
    """
    reference_ratio = _RATIO.fullmatch(right)
    if reference_ratio is None:
        return False
    if answer_ratio := _RATIO.fullmatch(left):
        return answer_ratio.groups() == reference_ratio.groups()
    found = _FRACTION.fullmatch(left)
    if found is None or _CLOCK.fullmatch(right) or not int(reference_ratio[2]):
        return False
    top, bottom = (part for part in found.groups() if part)
    ratio = Fraction(int(reference_ratio[1]), int(reference_ratio[2]))
    return (int(top), int(bottom)) == (ratio.numerator, ratio.denominator)
