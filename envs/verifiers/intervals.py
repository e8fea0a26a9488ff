r"""Parses sets of real numbers, written as intervals or as conditions, into one form.

`(1,3]`, `1<x\leq 3` and `\{x|1<x\leq3\}` are one interval; `x\neq3` and `\mathbb{R}\setminus\{3\}` are two. The
functions work on text and do not use sympy.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from envs.verifiers.elements import split_alternatives
from envs.verifiers.latex import split_top_level, strip_brackets

INFINITY = "\\infty"
_UNKNOWN = re.compile(r"[a-zA-Z](?:_\w)?|[a-zA-Z]\([a-z]\)|\\(?:alpha|beta|gamma|theta|lambda|mu|omega|phi)")
_BUILDER = re.compile(
    r"\\\{(?P<name>[a-zA-Z])(?:\\in(?:R|\\mathbb\{R\}|\\mathbb R))?[|:](?P<condition>.+)\\\}", re.DOTALL
)
_MEMBER = re.compile(r"(?P<name>[a-zA-Z])\\in(?![a-z])(?P<set>.+)", re.DOTALL)
_REALS_EXCEPT = re.compile(
    r"(?:R|\\mathbb\{R\}|\\mathbb R|\(-\\infty,\\infty\))(?:\\setminus|-|\\)\\\{(?P<points>[^{}]+)\\\}"
)
_REALS = re.compile(
    r"R|\\mathbb\{R\}|\\mathbb R|\(-\\infty,\\infty\)|(?:the set of )?all real(?: number| value)?s?(?: of [a-z])?",
    re.IGNORECASE,
)
_SIGNS = ("\\leq", "\\geq", "\\neq", "<", ">")


class Interval(NamedTuple):
    """Interval of real numbers with the ends `low` and `high`.

    low_closed, high_closed: whether the end belongs to the interval.
    """

    low: str
    low_closed: bool
    high: str
    high_closed: bool


class RealSet(NamedTuple):
    """Set of real numbers: a union of intervals in the written order.

    name: the unknown's name, or empty.
    as_condition: whether the set is written as a condition such as `x>2`.
    """

    name: str
    intervals: list[Interval]
    as_condition: bool


def parse_real_set(text: str) -> RealSet | None:
    """Parses the set of real numbers that a canonical text describes, or returns None."""
    if not any(mark in text for mark in ("<", ">", "\\leq", "\\geq", "\\neq", "\\infty", "[", "(", "R", "eal")):
        return None
    name = ""
    if found := _BUILDER.fullmatch(text):
        name, text = found["name"], found["condition"]
    elif found := _MEMBER.fullmatch(text):
        name, text = found["name"], found["set"]
    if _REALS.fullmatch(text):
        return RealSet(name, [Interval(f"-{INFINITY}", False, INFINITY, False)], False)
    if found := _REALS_EXCEPT.fullmatch(text):
        return RealSet(name, _intervals_between(found["points"].split(",")), False)
    intervals: list[Interval] = []
    conditions = 0
    for part in split_alternatives(text):
        condition = _parse_condition(part)
        unknown_name, part_intervals = condition if condition else ("", _parse_interval(part))
        if not part_intervals or (unknown_name and name not in ("", unknown_name)):
            return None
        name = unknown_name or name
        conditions += condition is not None
        intervals += part_intervals
    if conditions not in (0, len(split_alternatives(text))):
        return None
    return RealSet(name, intervals, conditions > 0)


def _intervals_between(points: list[str]) -> list[Interval]:
    """Returns all real numbers except the given points, which must be in rising order."""
    ends = [f"-{INFINITY}", *points, INFINITY]
    return [Interval(low, False, high, False) for low, high in pairwise(ends)]


def _parse_interval(text: str) -> list[Interval]:
    """Returns the interval of a text such as `(1,3]` as a list.

    The list is empty if the text is not an interval.
    """
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return []
    ends = split_top_level(text[1:-1], (",", ";"))
    if len(ends) != 2 or not all(ends):
        return []
    return [Interval(ends[0], text[0] == "[", ends[1], text[-1] == "]")]


def _parse_condition(text: str) -> tuple[str, list[Interval]] | None:
    r"""Returns the name and the intervals of a condition such as `x>2` or `x\neq3`.

    The result is None for any other text, also for `x>y` with two unknowns.
    """
    text = strip_brackets(text.strip())
    raw_sides = split_top_level(text, _SIGNS)
    signs = relation_signs(text, raw_sides, _SIGNS)
    sides = [strip_brackets(side.strip()) for side in raw_sides]
    unknown = [_UNKNOWN.fullmatch(side) is not None for side in sides]
    if len(sides) == 3 and unknown == [False, True, False]:
        low, name, high = sides
        if all(sign in ("<", "\\leq") for sign in signs):
            return name, [Interval(low, signs[0] == "\\leq", high, signs[1] == "\\leq")]
        if all(sign in (">", "\\geq") for sign in signs):
            return name, [Interval(high, signs[1] == "\\geq", low, signs[0] == "\\geq")]
        return None
    if len(sides) != 2 or unknown not in ([True, False], [False, True]):
        return None
    name, bound, sign = sides[0], sides[1], signs[0]
    if unknown[1]:
        name, bound = bound, name
        sign = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}.get(sign, sign)
    if sign == "\\neq":
        return name, _intervals_between([bound])
    if sign in ("<", "\\leq"):
        return name, [Interval(f"-{INFINITY}", False, bound, sign == "\\leq")]
    return name, [Interval(bound, sign == "\\geq", INFINITY, False)]


def relation_signs(text: str, sides: Sequence[str], relations: tuple[str, ...]) -> list[str]:
    """Returns the signs between the sides that `split_top_level` cut out of a text."""
    signs, position = [], 0
    for side in sides[:-1]:
        position += len(side)
        sign = next(sign for sign in relations if text.startswith(sign, position))
        signs.append(sign)
        position += len(sign)
    return signs
