"""Sets of real numbers in one form, whether they are written as intervals or as conditions. Pure text, no sympy.

`(1,3]`, `1<x\\leq 3` and `\\{x|1<x\\leq3\\}` are one interval, `x\\neq3` and `\\mathbb{R}\\setminus\\{3\\}` are two.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from envs.verifiers.elements import alternatives
from envs.verifiers.latex import split_top, without_brackets

INFINITY = "\\infty"
_UNKNOWN = re.compile(r"[a-zA-Z](?:_\w)?|[a-zA-Z]\([a-z]\)|\\(?:alpha|beta|gamma|theta|lambda|mu|omega|phi)")
_BUILDER = re.compile(
    r"\\\{(?P<name>[a-zA-Z])(?:\\in(?:R|\\mathbb\{R\}|\\mathbb R))?[|:](?P<condition>.+)\\\}", re.DOTALL
)
_MEMBER = re.compile(r"(?P<name>[a-zA-Z])\\in(?![a-z])(?P<set>.+)", re.DOTALL)
_WITHOUT = re.compile(
    r"(?:R|\\mathbb\{R\}|\\mathbb R|\(-\\infty,\\infty\))(?:\\setminus|-|\\)\\\{(?P<points>[^{}]+)\\\}"
)
_REALS = re.compile(
    r"R|\\mathbb\{R\}|\\mathbb R|\(-\\infty,\\infty\)|(?:the set of )?all real(?: number| value)?s?(?: of [a-z])?",
    re.IGNORECASE,
)
_SIGNS = ("\\leq", "\\geq", "\\neq", "<", ">")


class Interval(NamedTuple):
    """From `low` to `high`; closed where the end belongs to it."""

    low: str
    low_closed: bool
    high: str
    high_closed: bool


class Reals(NamedTuple):
    """A set of numbers: a union of intervals, in the order in which they are written.

    name: of the unknown, or empty. as_condition: it is written as one, `x>2`.
    """

    name: str
    intervals: list[Interval]
    as_condition: bool


def read_reals(text: str) -> Reals | None:
    """The set that a canonical text describes; None where it describes none."""
    if not any(
        mark in text for mark in ("<", ">", "\\leq", "\\geq", "\\neq", "\\infty", "[", "(", "R", "eal")
    ):
        return None
    name = ""
    if found := _BUILDER.fullmatch(text):
        name, text = found["name"], found["condition"]
    elif found := _MEMBER.fullmatch(text):
        name, text = found["name"], found["set"]
    if _REALS.fullmatch(text):
        return Reals(name, [Interval(f"-{INFINITY}", False, INFINITY, False)], False)
    if found := _WITHOUT.fullmatch(text):
        return Reals(name, _gaps(found["points"].split(",")), False)
    intervals: list[Interval] = []
    conditions = 0
    for part in alternatives(text):
        condition = _condition(part)
        named, read = condition if condition else ("", _interval(part))
        if not read or (named and name not in ("", named)):
            return None
        name = named or name
        conditions += condition is not None
        intervals += read
    if conditions not in (0, len(alternatives(text))):
        return None
    return Reals(name, intervals, conditions > 0)


def _gaps(points: list[str]) -> list[Interval]:
    """All numbers but these, which must be in rising order."""
    ends = [f"-{INFINITY}", *points, INFINITY]
    return [Interval(low, False, high, False) for low, high in pairwise(ends)]


def _interval(text: str) -> list[Interval]:
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return []
    ends = split_top(text[1:-1], (",", ";"))
    if len(ends) != 2 or not all(ends):
        return []
    return [Interval(ends[0], text[0] == "[", ends[1], text[-1] == "]")]


def _condition(text: str) -> tuple[str, list[Interval]] | None:
    """Name and intervals of `x>2`, `1<x\\leq3`, `x\\neq3`; None for another text, `x>y` with two unknowns too."""
    text = without_brackets(text.strip())
    cut = split_top(text, _SIGNS)
    signs = relation_signs(text, cut, _SIGNS)
    sides = [without_brackets(side.strip()) for side in cut]
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
        return name, _gaps([bound])
    if sign in ("<", "\\leq"):
        return name, [Interval(f"-{INFINITY}", False, bound, sign == "\\leq")]
    return name, [Interval(bound, sign == "\\geq", INFINITY, False)]


def relation_signs(text: str, sides: Sequence[str], relations: tuple[str, ...]) -> list[str]:
    """The signs between the sides into which `split_top` cut a text, in their order."""
    signs, position = [], 0
    for side in sides[:-1]:
        position += len(side)
        sign = next(sign for sign in relations if text.startswith(sign, position))
        signs.append(sign)
        position += len(sign)
    return signs
