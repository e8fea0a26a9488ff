"""Comparison of a final answer with the gold, in value. Our own rules, with math-verify's LaTeX parser for the rest.

In order, and each step decides what it can:

1. both in one spelling (`latex.canonical`): equal texts are the same, empty ones never are;
2. plain numbers, fractions and mixed numbers: exact values, so 9999 is not 10,000 and 0.333 is not 1/3;
3. lists, tuples, intervals, unions, matrices, equations and inequalities: element by element;
4. formulas within the limits of `bounds`: parsed and compared in value at fixed points.

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
from collections.abc import Sequence
from fractions import Fraction

from envs.verifiers.bounds import is_bounded
from envs.verifiers.extract import NOT_VARIABLES, boxed, chain_end, from_prose
from envs.verifiers.formulas import equal_in_value, proportional
from envs.verifiers.latex import canonical, split_top, split_unit
from envs.verifiers.numbers import is_worked_out, parse_number, plain, same_number
from envs.verifiers.words import number_in_words
from envs.verifiers.worked_out import worked_out

MAX_FORMULA_CHARACTERS = 2000
"""A longer text is compared as text only (after the removal of surrounding brackets)."""
MAX_GIVEN_CHARACTERS = 20_000
"""A longer text is never the gold: not even its brackets are looked at."""
MAX_ELEMENTS = 64

_RELATIONS = ("\\leq", "\\geq", "\\neq", "<", ">", "=")
_FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq"}
_ASSIGNED = re.compile(r"([a-zA-Z](?:_\w|\([a-z](?:,[a-z])*\))?(?:=|\\in))(.+)", re.DOTALL)
_VARIABLE = re.compile(r"[a-df-hj-zA-Z]")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
_WORD = re.compile(r"[A-Za-z][A-Za-z .'-]+")
_SIGNED_BRACKET = re.compile(r"[-+](?:\([^-+()]*\)|\{[^-+{}]*\})")
_OPEN, _CLOSE = "([", ")]"


def same_answer(given: str, gold: str) -> bool:
    """Whether a final answer, as written, is the gold. Symmetric except for names and units the gold leaves out."""
    if "\\boxed" in given:
        given = boxed(given) or ""
    if "\\boxed" in gold:
        gold = boxed(gold) or gold
    if len(given) > MAX_GIVEN_CHARACTERS:
        return False
    if parse_number(gold) is not None:
        for text in (given, plain(given)):
            if parse_number(text) is not None:
                return same_number(text, gold)
    left, right = canonical(given), canonical(gold)
    if not left or not right:
        return False
    if left == right:
        return True
    if max(len(left), len(right)) > MAX_FORMULA_CHARACTERS:
        return False
    if _same(left, right):
        return True
    spoken = canonical(from_prose(given))
    return spoken not in ("", left) and _same(spoken, right)


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
    for compare in (_same_matrix, _same_plus_minus, _same_union, _same_relation, _same_list):
        if (same := compare(left, right)) is not None:
            return same
    if not is_bounded(left) or not is_bounded(right):
        return False
    if _is_closed(right) and not worked_out(left, right):
        return False
    return equal_in_value(left, right)


def _bare(left: str, right: str) -> tuple[str, str, bool]:
    """Both without a name (`k=3`) that one or both of them have, the start of a chain whose end is a number, or a unit
    that only one of them has; False when their units contradict."""
    left_name, right_name = _ASSIGNED.fullmatch(left), _ASSIGNED.fullmatch(right)
    if left_name and right_name and left_name[1] == right_name[1]:
        left, right = left_name[2], right_name[2]
    elif left_name and not right_name and "=" not in right:
        left = left_name[2]
    elif right_name and not left_name and "=" not in left:
        right = right_name[2]
    if "=" in left and "=" not in right and _is_closed(right):
        left = chain_end(left)
    (left_value, left_unit), (right_value, right_unit) = split_unit(left), split_unit(right)
    if not left_unit and not right_unit:
        return left, right, True
    if left_unit and right_unit and left_unit != right_unit:
        return left, right, False
    return left_value, right_value, True


def _is_closed(text: str) -> bool:
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
    rows = [
        [row.split("&") for row in re.split(r"\\\\", match[1].strip("\\")) if row] for match in found if match
    ]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    return all(_all_same(a, b) for a, b in zip(*rows, strict=True))


def _same_plus_minus(left: str, right: str) -> bool | None:
    """`a\\pm b` is the list a+b, a-b; None when neither has exactly one such sign."""
    signs = [text.count("\\pm") for text in (left, right)]
    if signs not in ([1, 0], [0, 1]):
        return None
    return _same_list(_both_signs(left), _both_signs(right))


def _both_signs(text: str) -> str:
    if "\\pm" not in text:
        return text
    return ",".join(text.replace("\\pm", sign).removeprefix("+") for sign in "+-")


def _same_union(left: str, right: str) -> bool | None:
    sets = [split_top(text, ("\\cup",)) for text in (left, right)]
    if len(sets[0]) == 1 and len(sets[1]) == 1:
        return None
    return _same_in_any_order(*sets)


def _same_relation(left: str, right: str) -> bool | None:
    """Side by side, or with the sides exchanged; two equations also when they are multiples of each other."""
    sides = [split_top(text, _RELATIONS) for text in (left, right)]
    if len(sides[0]) == 1 and len(sides[1]) == 1:
        return None
    signs = [_signs(text, each) for text, each in zip((left, right), sides, strict=True)]
    if len(sides[0]) != len(sides[1]):
        return False
    if signs[0] == signs[1] and _all_same(*sides):
        return True
    if signs[0] == [_FLIPPED[sign] for sign in reversed(signs[1])] and _all_same(sides[0], sides[1][::-1]):
        return True
    if signs != [["="], ["="]] or _solved(sides[0]) or _solved(sides[1]):
        return False
    if not is_bounded(left) or not is_bounded(right):
        return False
    return proportional(*(f"({each[0]})-({each[1]})" for each in sides))


def _solved(sides: Sequence[str]) -> bool:
    """Whether an equation gives a value to a variable: `2x=10` does not stand for its solution."""
    return any(_is_closed(side) for side in sides) and any(
        len(side) == 1 and side.isalpha() for side in sides
    )


def _signs(text: str, sides: Sequence[str]) -> list[str]:
    signs, position = [], 0
    for side in sides[:-1]:
        position += len(side)
        sign = next(sign for sign in _RELATIONS if text.startswith(sign, position))
        signs.append(sign)
        position += len(sign)
    return signs


def _same_list(left: str, right: str) -> bool | None:
    """Tuples and intervals in order with the same brackets, sets and bare lists in any order."""
    first, second = _items(left), _items(right)
    if first is None and second is None:
        return None
    if first is None or second is None:
        return False
    (left_brackets, left_parts), (right_brackets, right_parts) = first, second
    if left_brackets in ("", "{}") and right_brackets in ("", "{}"):
        return _same_in_any_order(left_parts, right_parts)
    return left_brackets == right_brackets and _all_same(left_parts, right_parts)


def _items(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of a list of two or more, or of a set in braces; None for anything else."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{}", split_top(text[2:-2], (",",))
    if text[:1] in _OPEN and text[-1:] in _CLOSE and text:
        inside = split_top(text[1:-1], (",",))
        whole = split_top(text, (",",))
        if len(whole) == 1 and len(inside) > 1:
            return text[0] + text[-1], inside
    pieces = split_top(text, (",",))
    elements = [element for piece in pieces for element in re.split(r"(?<=[\d)}]) and (?=[-\d(\\])", piece)]
    return ("", elements) if len(elements) > 1 else None


def _all_same(left: Sequence[str], right: Sequence[str]) -> bool:
    if len(left) != len(right) or len(left) > MAX_ELEMENTS:
        return False
    return all(_same(a.strip(), b.strip()) for a, b in zip(left, right, strict=True))


def _same_in_any_order(left: Sequence[str], right: Sequence[str]) -> bool:
    if len(left) != len(right) or len(left) > MAX_ELEMENTS:
        return False
    rest = list(right)
    for element in left:
        match = next((other for other in rest if _same(element.strip(), other.strip())), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def warm_up() -> None:
    """Import what the first formula would import, about a second."""
    equal_in_value("\\sqrt{8}", "2\\sqrt{2}")
