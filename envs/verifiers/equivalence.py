r"""Compares a final answer with a reference answer, by value.

The rules are our own; math-verify's LaTeX parser reads the rest. Each step decides what it can, in this order:

1. Both answers are put into one spelling (`latex.canonical_text`). Equal texts are the same, unless empty.
2. Plain numbers, fractions and mixed numbers have exact values, so 9999 is not 10,000 and 0.333 is not 1/3.
3. Lists, tuples, intervals, unions, matrices, equations and inequalities are compared element by element.
4. Formulas within the limits of `formula_size` are parsed and compared in value at fixed points.

A reference answer that is text but looks like arithmetic (`2024-05-17`, `10-20`, `H2O`; see `text_references`)
is compared as written. If the reference answer, or an element of it, is a number, the final answer must be
simplified (docs/rewards.md: "worked out"): 8+3, 22/2, \sqrt{121} and 11^1 are not 11. Otherwise a model would
be paid for repeating the question. In detail:

- A reference answer that is a whole number, a decimal, a fraction or a mixed number needs a final answer of
  these kinds (or in scientific notation, or a whole number in words). A fraction must be in lowest terms unless
  the reference answer is not.
- For another number (2\sqrt{2}, \frac{\pi}{4}, 2^{10}), the final answer has the same value and leaves no more
  operations to do than the reference answer (`is_simplified`). So 1024 is 2^{10}, and \sqrt{8} is not
  2\sqrt{2}.
- A chain of equations counts by its end: 8 + 3 = 11 is 11, and 11 = 8 + 3 is 8 + 3.
- A reference answer with variables is compared in value only.

Two texts that cannot be read are the same only if they are equal. Nothing here uses signals or threads; a
caller that needs a deadline runs the comparison in a process of its own.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from envs.verifiers.characters import unicode_to_latex
from envs.verifiers.elements import (
    drop_repeats,
    expand_all_signs,
    expand_signs,
    parse_list,
    value_of_term,
    without_names,
)
from envs.verifiers.extract import NON_VARIABLE_NAMES, chain_end, claim_in_sentence, joined_boxes
from envs.verifiers.formula_size import is_bounded
from envs.verifiers.formulas import constant_ratio, equal_in_value
from envs.verifiers.intervals import INFINITY, Interval, parse_real_set, relation_signs
from envs.verifiers.latex import canonical_text, split_top_level
from envs.verifiers.number_words import parse_number_words
from envs.verifiers.numbers import is_simplified_number, parse_number, same_number, strip_number_marks
from envs.verifiers.phrases import same_phrase
from envs.verifiers.simplification import is_simplified
from envs.verifiers.text_references import is_compared_as_text, is_text_reference, normalize_spelling, text_elements
from envs.verifiers.units import has_unit_sign, named_units, split_unit

MAX_FORMULA_CHARACTERS = 2000
"""Maximum length of a formula; longer texts are compared only as text, after the removal of outer brackets."""
MAX_ANSWER_CHARACTERS = 20_000
"""Maximum length of a final answer; a longer text never equals the reference answer."""
MAX_ELEMENTS = 64
MAX_ROUNDING = Fraction(1, 20)
"""Maximum relative difference between the sides of a chain, such as 2/3 = 0.67."""

_RELATIONS = ("\\leq", "\\geq", "\\neq", "<", ">", "=")
_REVERSE = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq"}
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
MIN_EXPONENT = 3
"""Minimum exponent of a number in program notation, such as `3.2e5`."""


def same_answer(final_answer: str, reference: str) -> bool:
    """Whether a final answer, as written, equals the reference answer.

    The comparison is symmetric, except for names and units that the reference answer leaves out.
    """
    if reference.isdigit() and final_answer.isdigit() and (reference + final_answer).isascii():
        # Fast path: most verdicts are about whole numbers.
        return (
            final_answer == reference
            if is_text_reference(reference)
            else reference.lstrip("0") == final_answer.lstrip("0")
        )
    if "\\boxed" in final_answer:
        final_answer = joined_boxes(final_answer) or ""
    if "\\boxed" in reference:
        reference = joined_boxes(reference) or reference
    if len(final_answer) > MAX_ANSWER_CHARACTERS:
        return False
    if final_answer == reference:
        return canonical_text(reference) != ""
    if (has_unit_sign(final_answer) or has_unit_sign(reference)) and _differ_in_unit(final_answer, reference):
        return False
    raw_reference = reference
    compare_as_text = is_compared_as_text(final_answer, reference)
    if not (final_answer.isascii() and reference.isascii()):
        final_answer, reference = unicode_to_latex(final_answer), unicode_to_latex(reference)
    if parse_number(reference) is not None and not is_text_reference(reference):
        for number in (final_answer, strip_number_marks(final_answer)):
            if parse_number(number) is not None:
                return same_number(number, reference)
    left, right = canonical_text(final_answer), canonical_text(reference)
    if not left or not right:
        return False
    if left == right:
        return True
    if max(len(left), len(right)) > MAX_FORMULA_CHARACTERS:
        return False
    if "\\approx" in right and "\\approx" not in left:
        return any(_same_canonical(left, side) for side in right.split("\\approx"))
    if compare_as_text:
        return any(_same_text(claim, right) for claim in (left, *_extract_claims(final_answer, left)))
    if elements := text_elements(raw_reference):
        return _same_text_elements(left, elements)
    unnamed_texts = without_names(left, right)
    if _same_canonical(left, right) or same_phrase(final_answer, *unnamed_texts):
        return True
    return any(_same_canonical(claim, right) for claim in _extract_claims(final_answer, left))


def _differ_in_unit(final_answer: str, reference: str) -> bool:
    """Whether both answers name a unit, such as dollars, and the units differ."""
    if max(len(final_answer), len(reference)) > MAX_FORMULA_CHARACTERS:
        return False
    first, second = (named_units(text, split_unit(canonical_text(text))[1]) for text in (final_answer, reference))
    return bool(first and second) and first.isdisjoint(second)


def _same_text(left: str, right: str) -> bool:
    """Whether two canonical texts have one spelling, apart from a name or unit."""
    left, right, compatible = _strip_names_and_units(left, right)
    return compatible and normalize_spelling(left) == normalize_spelling(right)


def _same_text_elements(left: str, elements: Sequence[str]) -> bool:
    """Whether a canonical text lists the given elements, some of them text, in any order."""
    brackets, rest = parse_list(left) or ("", [left])
    if brackets not in ("", "{}") or len(rest) != len(elements):
        return False
    targets = [
        (_same_text if is_text_reference(element) else _same_canonical, canonical_text(element)) for element in elements
    ]
    return _match_pairs(targets, rest, lambda target, element: target[0](element.strip(), target[1]))


def _extract_claims(final_answer: str, left: str) -> list[str]:
    """Returns the canonical claims of a final answer (canonical: `left`) that is a sentence."""
    claims = {claim_in_sentence(sentence) for sentence in (final_answer, left)} - {final_answer, left}
    return [claim for claim in map(canonical_text, claims) if claim not in ("", left)]


def _same_canonical(left: str, right: str) -> bool:
    """Whether two canonical texts are the same answer."""
    if left == right:
        return bool(left)
    left, right, compatible = _strip_names_and_units(left, right)
    if left == right:
        return compatible and bool(left)
    if not compatible:
        return False
    if _parse_canonical_number(right) is not None:
        return _same_number(left, right)
    if _WORD.fullmatch(left) and _WORD.fullmatch(right):
        return left.casefold() == right.casefold()
    for compare in (_same_matrix, _same_plus_minus, _same_reals, _same_union, _same_relation, _same_list):
        if (verdict := compare(left, right)) is not None:
            return verdict
    return _same_formula(left, right)


def _same_formula(left: str, right: str) -> bool:
    """Whether two formulas have the same value, and series over a range the same range."""
    series = [_SERIES.fullmatch(text) for text in (left, right)]
    if series[0] and series[1]:
        return series[0]["head"] == series[1]["head"] and _same_formula(series[0]["body"], series[1]["body"])
    if not is_bounded(left) or not is_bounded(right):
        return False
    if is_closed(right) and not is_simplified(left, right):
        return False
    return equal_in_value(left, right)


def _strip_names_and_units(left: str, right: str) -> tuple[str, str, bool]:
    """Removes names, the start of a chain, and units from two canonical texts.

    Names (`k=3`) are removed from one text or both, the start of a chain if its end is a number, and a unit if
    the other text has none or the same.

    Returns:
        Both texts, and whether their units agree.
    """
    left, right = _strip_conditions(left), _strip_conditions(right)
    if ":" in left and ":" not in right and (label := _LABEL.fullmatch(left)):
        left = label["value"]
    left, right = without_names(left, right)
    if "=" in left and "=" not in right and is_closed(right):
        values = [value for side in left.split("=") if (value := parse_number(side)) is not None]
        # All numbers of a chain must be equal, except for rounding: 12 = 11 has no value.
        if not values or max(values) - min(values) <= MAX_ROUNDING * max(map(abs, values)):
            left = chain_end(value_of_term(left))
    (left_value, left_unit), (right_value, right_unit) = split_unit(left), split_unit(right)
    left_value, right_value = _expand_exponent(left_value), _expand_exponent(right_value)
    if not left_unit or not right_unit or left_unit == right_unit:
        return left_value, right_value, True
    return left, right, False


def _strip_conditions(text: str) -> str:
    r"""Removes a condition at the end, such as `, k\in Z` or `for all x`."""
    if "\\in" in text or "for" in text:
        for tail in (_FOR_WHICH, _FOR_ALL):
            *_, last = [None, *tail.finditer(text)]
            if last is not None and last.start() > 0 and last.end() == len(text):
                text = text[: last.start()]
    return text


def _expand_exponent(text: str) -> str:
    r"""Writes program notation such as `3.2e5` as `3.2\times10^{5}`."""
    found = _EXPONENT.fullmatch(text)
    if found is None or int(found[3]) < MIN_EXPONENT:
        return text
    return f"{found[1]}\\times10^{{{found[2]}{found[3]}}}"


def is_closed(text: str) -> bool:
    """Whether a formula has no variables; e and i are not variables."""
    return not _VARIABLE.search(NON_VARIABLE_NAMES.sub("", text))


def _parse_canonical_number(text: str) -> Fraction | int | None:
    """Returns the value of a canonical number, which has no comma, or None."""
    value = None if "," in text else parse_number(text)
    return parse_number_words(text) if value is None else value


def _same_number(left: str, right: str) -> bool:
    """Whether a text equals the number `right` and is simplified, if `right` is."""
    if _SIGNED_BRACKET.fullmatch(left):
        left = left[0] + left[2:-1]
    value = _parse_canonical_number(left)
    is_final = parse_number(left) is None or is_simplified_number(left) or not is_simplified_number(right)
    return value is not None and value == _parse_canonical_number(right) and is_final


def _same_matrix(left: str, right: str) -> bool | None:
    """Compares two matrices row by row; returns None if neither text is a matrix."""
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
    r"""Compares `a\pm b` with a+b, a-b; returns None without exactly one such sign."""
    signs = [text.count("\\pm") for text in (left, right)]
    if signs not in ([1, 0], [0, 1]) or parse_list(left if signs[0] else right):
        return None
    return _same_list(",".join(expand_signs(left)), ",".join(expand_signs(right)))


def _same_reals(left: str, right: str) -> bool | None:
    """Compares two sets of real numbers by intervals; returns None for other texts."""
    first, second = parse_real_set(left), parse_real_set(right)
    if first is None or second is None:
        return None
    if not any(
        reals.as_condition or len(reals.intervals) > 1 or reals.intervals[0].low.endswith(INFINITY)
        for reals in (first, second)
    ):
        return None  # two pairs of numbers may also be points
    if first.name and second.name and first.name != second.name:
        return False
    return _match_pairs(first.intervals, second.intervals, _same_interval)


def _same_interval(left: Interval, right: Interval) -> bool:
    closed = (left.low_closed, left.high_closed) == (right.low_closed, right.high_closed)
    return closed and _same_canonical(left.low, right.low) and _same_canonical(left.high, right.high)


def _same_union(left: str, right: str) -> bool | None:
    """Compares two unions set by set; returns None if neither text is a union."""
    sets = [split_top_level(text, ("\\cup",)) for text in (left, right)]
    if len(sets[0]) == 1 and len(sets[1]) == 1:
        return None
    return _same_in_any_order(*sets)


def _same_relation(left: str, right: str) -> bool | None:
    """Compares two relations by their sides in both orders, or as multiples of each other."""
    sides = [split_top_level(text, _RELATIONS) for text in (left, right)]
    if len(sides[0]) == 1 and len(sides[1]) == 1:
        return None
    if all((found := parse_list(text)) and not found[0] for text in (left, right)):
        return None  # a list of relations is compared as a list
    signs = [relation_signs(text, each, _RELATIONS) for text, each in zip((left, right), sides, strict=True)]
    if len(sides[0]) != len(sides[1]):
        return False
    if signs[0] == signs[1] and _all_same(*sides):
        return True
    if signs[0] == [_REVERSE[sign] for sign in reversed(signs[1])] and _all_same(sides[0], sides[1][::-1]):
        return True
    if len(sides[0]) > 2 or not is_bounded(left) or not is_bounded(right):
        return False
    return _are_multiples(sides[0], sides[1], signs[0][0], signs[1][0])


def _are_multiples(left: Sequence[str], right: Sequence[str], sign: str, reference_sign: str) -> bool:
    """Whether one relation is a multiple of the other.

    A negative factor reverses the sign of an inequality. A solved relation (`x=3`, `x<3`) is only equal to its
    own negative: `2x=6` still has to be solved.
    """
    is_solved = _is_solved(left) or _is_solved(right)
    if sign not in (reference_sign, _REVERSE[reference_sign]) or (is_solved and sign == "="):
        return False
    factor = constant_ratio(*(f"({each[0]})-({each[1]})" for each in (left, right)))
    if factor is None or (is_solved and abs(factor) != 1):
        return False
    return reference_sign in ("=", "\\neq") or (factor.is_real and (factor > 0) == (sign == reference_sign))


def _is_solved(sides: Sequence[str]) -> bool:
    """Whether an equation states the value of a variable; `2x=10` does not."""
    return any(is_closed(side) for side in sides) and any(len(side) == 1 and side.isalpha() for side in sides)


def _same_list(left: str, right: str) -> bool | None:
    """Compares two lists element by element; returns None if neither text is a list.

    Sets and bare lists are in any order. An element that one set repeats counts once if the other has no repeats.
    """
    first, second = parse_list(left), parse_list(right)
    if first is None and second is None:
        return None
    if first is None or second is None:
        return False
    (left_brackets, left_parts), (right_brackets, right_parts) = first, second
    if left_brackets in ("", "{}") and right_brackets in ("", "{}"):
        left_parts = drop_repeats(left_parts, right_parts) if left_brackets else left_parts
        right_parts = drop_repeats(right_parts, left_parts) if right_brackets else right_parts
        if len(left_parts) != len(right_parts):
            left_parts, right_parts = expand_all_signs(left_parts), expand_all_signs(right_parts)
        return _same_in_any_order(left_parts, right_parts)
    return left_brackets == right_brackets and _all_same(left_parts, right_parts)


def _all_same(left: Sequence[str], right: Sequence[str]) -> bool:
    if len(left) != len(right) or len(left) > MAX_ELEMENTS:
        return False
    return all(_same_canonical(a.strip(), b.strip()) for a, b in zip(left, right, strict=True))


def _same_in_any_order(left: Sequence[str], right: Sequence[str]) -> bool:
    if len(left) != len(right) or len(left) > MAX_ELEMENTS:
        return False
    return _match_pairs(left, right, lambda element, candidate: _same_canonical(element.strip(), candidate.strip()))


def _match_pairs(left: Sequence[Any], right: Sequence[Any], is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether the elements of two lists match one to one in any order."""
    rest = list(right)
    for element in left:
        match = next((place for place, other in enumerate(rest) if is_same(element, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def warm_up() -> None:
    """Imports the modules that the first formula comparison needs."""
    equal_in_value("\\sqrt{8}", "2\\sqrt{2}")
