r"""Comparison of a final answer with the gold, in value. Our own rules, with math-verify's LaTeX parser for the rest.

In order, and each step decides what it can:

1. both in one spelling (`latex.canonical`): equal texts are the same, empty ones never are;
2. plain numbers, fractions and mixed numbers: exact values, so 9999 is not 10,000 and 0.333 is not 1/3;
3. lists, tuples, intervals, unions, matrices, equations and inequalities: element by element;
4. formulas within the limits of `bounds`: parsed and compared in value at fixed points.

A gold that is text though it looks like arithmetic (`2024-05-17`, `10-20`, `H2O`; `text_golds`) is compared as written.

Where the gold, or an element of it, is a number, the given one must be worked out: 8+3, 22/2, \sqrt{121} and 11^1 are
not 11. Else a model is paid for repeating the question. In detail:

- the gold is a whole number, a decimal, a fraction or a mixed number: so is the given one (or it is in scientific
  notation, or a whole number in words), its fraction in lowest terms unless the gold's is not;
- the gold is another number (2\sqrt{2}, \frac{\pi}{4}, 2^{10}): the given one has its value and leaves no more to be
  done than it does (`worked_out`), so 1024 is 2^{10}, and \sqrt{8} is not 2\sqrt{2};
- a chain of equations counts by its end: 8 + 3 = 11 is 11, and 11 = 8 + 3 is 8 + 3;
- a gold with variables is compared in value only.

Two texts that cannot be read are not the same unless they are equal. Nothing here uses signals or threads; a
caller that needs a deadline runs it in a process of its own.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from envs.verifiers.bounds import is_bounded
from envs.verifiers.characters import in_latex
from envs.verifiers.elements import both_signs, items, once, value_of_term, with_both_signs, without_names
from envs.verifiers.extract import NOT_VARIABLES, boxed_together, chain_end, from_prose
from envs.verifiers.formulas import equal_in_value, ratio
from envs.verifiers.intervals import INFINITY, Interval, read_reals, relation_signs
from envs.verifiers.latex import canonical, split_top
from envs.verifiers.numbers import is_worked_out, parse_number, plain, same_number
from envs.verifiers.phrases import same_phrase
from envs.verifiers.text_golds import as_written, is_text, listed, spelled
from envs.verifiers.units import has_sign, quantities, split_unit
from envs.verifiers.words import number_in_words
from envs.verifiers.worked_out import worked_out

MAX_FORMULA_CHARACTERS = 2000
"""A longer text is compared as text only (after the removal of surrounding brackets)."""
MAX_GIVEN_CHARACTERS = 20_000
"""A longer text is never the gold: not even its brackets are looked at."""
MAX_ELEMENTS = 64
MAX_ROUNDING = Fraction(1, 20)
"""Of the sides of a chain: 2/3 = 0.67."""

_RELATIONS = ("\\leq", "\\geq", "\\neq", "<", ">", "=")
_FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq"}
_VARIABLE = re.compile(r"[a-df-hj-zA-Z]")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
_WORD = re.compile(r"[A-Za-z][A-Za-z .'-]+")
_SIGNED_BRACKET = re.compile(r"[-+](?:\([^-+()]*\)|\{[^-+{}]*\})")
_SERIES = re.compile(r"(?P<head>\\(?:sum|prod)(?:[_^](?:\{[^{}]*\}|\w))*)(?P<body>.+)", re.DOTALL)
_LABEL = re.compile(r"[A-Za-z][A-Za-z ]{2,}:(?P<value>.+)", re.DOTALL)
_FOR_WHICH = re.compile(
    r"(?:,|(?P<open>\())(?:where |for )?[a-z]\\in(?:\\mathbb)? ?\{?[ZNQR]\}?(?:[\^_][+*])?(?(open)\))"
)
_FOR_ALL = re.compile(r" ?for (?:all|every|any)[a-zA-Z ]*")
_EXPONENT = re.compile(r"([-+]?[1-9](?:\.\d+)?)[eE]([-+]?)0*(\d{1,3})", re.ASCII)
LEAST_EXPONENT = 3
"""Of a number in a program's notation: `3.2e5` is one, below a thousand anybody writes it out."""


def same_answer(given: str, gold: str) -> bool:
    """Whether a final answer, as written, is the gold. Symmetric except for names and units the gold leaves out."""
    if gold.isdigit() and given.isdigit() and (gold + given).isascii():
        # most verdicts are on whole numbers
        return given == gold if is_text(gold) else gold.lstrip("0") == given.lstrip("0")
    if "\\boxed" in given:
        given = boxed_together(given) or ""
    if "\\boxed" in gold:
        gold = boxed_together(gold) or gold
    if len(given) > MAX_GIVEN_CHARACTERS:
        return False
    if given == gold:
        return canonical(gold) != ""
    if (has_sign(given) or has_sign(gold)) and _of_different_quantities(given, gold):
        return False
    written = gold
    textual = as_written(given, gold)
    if not (given.isascii() and gold.isascii()):
        given, gold = in_latex(given), in_latex(gold)
    if parse_number(gold) is not None and not is_text(gold):
        for number in (given, plain(given)):
            if parse_number(number) is not None:
                return same_number(number, gold)
    left, right = canonical(given), canonical(gold)
    if not left or not right:
        return False
    if left == right:
        return True
    if max(len(left), len(right)) > MAX_FORMULA_CHARACTERS:
        return False
    if "\\approx" in right and "\\approx" not in left:
        return any(_same(left, side) for side in right.split("\\approx"))
    if textual:
        return any(_same_text(claim, right) for claim in (left, *_claims(given, left)))
    if elements := listed(written):
        return _same_listed(left, elements)
    bare = without_names(left, right)
    if _same(left, right) or same_phrase(given, *bare):
        return True
    return any(_same(claim, right) for claim in _claims(given, left))


def _of_different_quantities(given: str, gold: str) -> bool:
    """Whether both say what they are an amount of, and it is not the same."""
    if max(len(given), len(gold)) > MAX_FORMULA_CHARACTERS:
        return False
    first, second = (quantities(text, split_unit(canonical(text))[1]) for text in (given, gold))
    return bool(first and second) and first.isdisjoint(second)


def _same_text(left: str, right: str) -> bool:
    """Whether two canonical texts are written alike, but for a name or unit."""
    left, right, compatible = _bare(left, right)
    return compatible and spelled(left) == spelled(right)


def _same_listed(left: str, elements: Sequence[str]) -> bool:
    """Whether a canonical text lists these elements, some of them text, in any order."""
    brackets, rest = items(left) or ("", [left])
    if brackets not in ("", "{}") or len(rest) != len(elements):
        return False
    wanted = [(_same_text if is_text(element) else _same, canonical(element)) for element in elements]
    return _pairs_up(wanted, rest, lambda want, other: want[0](other.strip(), want[1]))


def _claims(given: str, left: str) -> list[str]:
    """Canonical claims of a final answer that is a sentence; else none."""
    claims = {from_prose(sentence) for sentence in (given, left)} - {given, left}
    return [claim for claim in map(canonical, claims) if claim not in ("", left)]


def _same(left: str, right: str) -> bool:
    """Of two canonical texts."""
    if left == right:
        return bool(left)
    left, right, compatible = _bare(left, right)
    if left == right:
        return compatible and bool(left)
    if not compatible:
        return False
    if _number(right) is not None:
        return _same_number(left, right)
    if _WORD.fullmatch(left) and _WORD.fullmatch(right):
        return left.casefold() == right.casefold()
    for compare in (_same_matrix, _same_plus_minus, _same_reals, _same_union, _same_relation, _same_list):
        if (same := compare(left, right)) is not None:
            return same
    return _same_formula(left, right)


def _same_formula(left: str, right: str) -> bool:
    """In value; sums and products over a range must have the same range."""
    series = [_SERIES.fullmatch(text) for text in (left, right)]
    if series[0] and series[1]:
        return series[0]["head"] == series[1]["head"] and _same_formula(series[0]["body"], series[1]["body"])
    if not is_bounded(left) or not is_bounded(right):
        return False
    if is_closed(right) and not worked_out(left, right):
        return False
    return equal_in_value(left, right)


def _bare(left: str, right: str) -> tuple[str, str, bool]:
    """Both without names (`k=3`) that one or both of them have, the start of a chain whose end is a number, or a unit
    that only one of them has; False when their units contradict."""
    left, right = _without_conditions(left), _without_conditions(right)
    if ":" in left and ":" not in right and (label := _LABEL.fullmatch(left)):
        left = label["value"]
    left, right = without_names(left, right)
    if "=" in left and "=" not in right and is_closed(right):
        values = [value for side in left.split("=") if (value := parse_number(side)) is not None]
        # The numbers of a chain are one, but for rounding: 12 = 11 says nothing.
        if not values or max(values) - min(values) <= MAX_ROUNDING * max(map(abs, values)):
            left = chain_end(value_of_term(left))
    (left_value, left_unit), (right_value, right_unit) = split_unit(left), split_unit(right)
    left_value, right_value = _exponent_written_out(left_value), _exponent_written_out(right_value)
    if not left_unit or not right_unit or left_unit == right_unit:
        return left_value, right_value, True
    return left, right, False


def _without_conditions(text: str) -> str:
    """Without `, k\\in Z` and `for all x` behind it."""
    if "\\in" in text or "for" in text:
        for tail in (_FOR_WHICH, _FOR_ALL):
            *_, last = [None, *tail.finditer(text)]
            if last is not None and last.start() > 0 and last.end() == len(text):
                text = text[: last.start()]
    return text


def _exponent_written_out(text: str) -> str:
    """`3.2e5` as `3.2\\times10^{5}`."""
    found = _EXPONENT.fullmatch(text)
    if found is None or int(found[3]) < LEAST_EXPONENT:
        return text
    return f"{found[1]}\\times10^{{{found[2]}{found[3]}}}"


def is_closed(text: str) -> bool:
    """Whether a formula has no variables: it is a number, perhaps with e or i."""
    return not _VARIABLE.search(NOT_VARIABLES.sub("", text))


def _number(text: str) -> Fraction | int | None:
    """The value of a canonical number; its thousands are grouped no more, so a comma makes it a list."""
    value = None if "," in text else parse_number(text)
    return number_in_words(text) if value is None else value


def _same_number(left: str, right: str) -> bool:
    """Whether a text is the number `right`, and worked out unless that is not."""
    if _SIGNED_BRACKET.fullmatch(left):
        left = left[0] + left[2:-1]
    value = _number(left)
    done = parse_number(left) is None or is_worked_out(left) or not is_worked_out(right)
    return value is not None and value == _number(right) and done


def _same_matrix(left: str, right: str) -> bool | None:
    """Row by row; None when neither is a matrix."""
    found = [_MATRIX.fullmatch(text) for text in (left, right)]
    if found[0] is None and found[1] is None:
        return None
    if found[0] is None or found[1] is None:
        return False
    rows = [[row.split("&") for row in match[1].split("\\\\") if row.strip("\\")] for match in found if match]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    return all(_all_same(a, b) for a, b in zip(*rows, strict=True))


def _same_plus_minus(left: str, right: str) -> bool | None:
    """`a\\pm b` is the list a+b, a-b; None when neither has exactly one such sign."""
    signs = [text.count("\\pm") for text in (left, right)]
    if signs not in ([1, 0], [0, 1]) or items(left if signs[0] else right):
        return None
    return _same_list(",".join(both_signs(left)), ",".join(both_signs(right)))


def _same_reals(left: str, right: str) -> bool | None:
    """Two sets of real numbers, at least one of them written as a condition, are the same intervals."""
    first, second = read_reals(left), read_reals(right)
    if first is None or second is None:
        return None
    if not any(
        reals.as_condition or len(reals.intervals) > 1 or reals.intervals[0].low.endswith(INFINITY)
        for reals in (first, second)
    ):
        return None  # two pairs of numbers may as well be points
    if first.name and second.name and first.name != second.name:
        return False
    return _pairs_up(first.intervals, second.intervals, _same_interval)


def _same_interval(left: Interval, right: Interval) -> bool:
    closed = (left.low_closed, left.high_closed) == (right.low_closed, right.high_closed)
    return closed and _same(left.low, right.low) and _same(left.high, right.high)


def _same_union(left: str, right: str) -> bool | None:
    sets = [split_top(text, ("\\cup",)) for text in (left, right)]
    if len(sets[0]) == 1 and len(sets[1]) == 1:
        return None
    return _same_in_any_order(*sets)


def _same_relation(left: str, right: str) -> bool | None:
    """Side by side, or with the sides exchanged; two of them also when they are multiples of each other."""
    sides = [split_top(text, _RELATIONS) for text in (left, right)]
    if len(sides[0]) == 1 and len(sides[1]) == 1:
        return None
    if all((found := items(text)) and not found[0] for text in (left, right)):
        return None  # a list of relations is compared as a list
    signs = [relation_signs(text, each, _RELATIONS) for text, each in zip((left, right), sides, strict=True)]
    if len(sides[0]) != len(sides[1]):
        return False
    if signs[0] == signs[1] and _all_same(*sides):
        return True
    if signs[0] == [_FLIPPED[sign] for sign in reversed(signs[1])] and _all_same(sides[0], sides[1][::-1]):
        return True
    if len(sides[0]) > 2 or not is_bounded(left) or not is_bounded(right):
        return False
    return _multiples(sides[0], sides[1], signs[0][0], signs[1][0])


def _multiples(left: Sequence[str], right: Sequence[str], sign: str, wanted: str) -> bool:
    """Whether one relation is a multiple of the other, which turns an inequality round where it is negative.

    Of one that is solved (`x=3`, `x<3`) only its own negative is: `2x=6` still has to be solved.
    """
    solved = _solved(left) or _solved(right)
    if sign not in (wanted, _FLIPPED[wanted]) or (solved and sign == "="):
        return False
    factor = ratio(*(f"({each[0]})-({each[1]})" for each in (left, right)))
    if factor is None or (solved and abs(factor) != 1):
        return False
    return wanted in ("=", "\\neq") or (factor.is_real and (factor > 0) == (sign == wanted))


def _solved(sides: Sequence[str]) -> bool:
    """Whether an equation gives a value to a variable: `2x=10` does not stand for its solution."""
    return any(is_closed(side) for side in sides) and any(len(side) == 1 and side.isalpha() for side in sides)


def _same_list(left: str, right: str) -> bool | None:
    """Compare lists: tuples and intervals in order, sets and bare lists in any.

    An element that one set has twice counts once where the other has each once.
    """
    first, second = items(left), items(right)
    if first is None and second is None:
        return None
    if first is None or second is None:
        return False
    (left_brackets, left_parts), (right_brackets, right_parts) = first, second
    if left_brackets in ("", "{}") and right_brackets in ("", "{}"):
        left_parts = once(left_parts, right_parts) if left_brackets else left_parts
        right_parts = once(right_parts, left_parts) if right_brackets else right_parts
        if len(left_parts) != len(right_parts):
            left_parts, right_parts = with_both_signs(left_parts), with_both_signs(right_parts)
        return _same_in_any_order(left_parts, right_parts)
    return left_brackets == right_brackets and _all_same(left_parts, right_parts)


def _all_same(left: Sequence[str], right: Sequence[str]) -> bool:
    if len(left) != len(right) or len(left) > MAX_ELEMENTS:
        return False
    return all(_same(a.strip(), b.strip()) for a, b in zip(left, right, strict=True))


def _same_in_any_order(left: Sequence[str], right: Sequence[str]) -> bool:
    if len(left) != len(right) or len(left) > MAX_ELEMENTS:
        return False
    return _pairs_up(left, right, lambda element, other: _same(element.strip(), other.strip()))


def _pairs_up(left: Sequence[Any], right: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether each of the left is the same as one of the right, of which there are no more, in any order."""
    rest = list(right)
    for element in left:
        match = next((place for place, other in enumerate(rest) if same(element, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def warm_up() -> None:
    """Import what the first formula would import, about a second."""
    equal_in_value("\\sqrt{8}", "2\\sqrt{2}")
