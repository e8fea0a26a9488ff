"""Rules for answers to puzzles of reasoning-gym (0.1.19), beside the library's scorers.

Some scorers evaluate the answer as Python: what is neither a literal nor a formula never reaches them. Some give full
marks to answers that are wrong: these must meet a rule of this file too.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from envs.verifiers.expressions import NOT_ARITHMETIC, makes, parse, value

Entry = Mapping[str, Any]
Rule = Callable[[str, Entry], bool]

FUNCTIONS = frozenset(
    (
        *("Abs", "abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp"),
        *("ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)
LARGEST_EXPONENT = 1000
PROBABILITY_TOLERANCE = 1e-4
"""The library's, of `coin_flip`."""
_NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?")
_DURATION = re.compile(r"(?:\d+ days?)?(?:(?<=[a-z]), )?(?:\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?")
_MOVES = re.compile(r"(?:[A-Z][+-]\d[\s,]*)+")


def _literal_or_right(given: str, entry: Entry) -> bool:
    right = (entry["answer"], *entry["metadata"].get("valid_answers", ()))
    if given in (text.strip() for text in right if text):
        return True
    try:
        ast.literal_eval(given)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _formula(given: str, entry: Entry) -> bool:
    try:
        return _is_formula(parse(given.strip()))
    except NOT_ARITHMETIC:
        return False


def _is_formula(node: ast.expr) -> bool:
    """Numbers, names, the four operations, powers that are no towers, and functions of analysis."""
    match node:
        case ast.Constant():
            return type(node.value) in (int, float)
        case ast.Name():
            return not node.id.startswith("_")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return _is_formula(node.operand)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            return _is_formula(node.left) and _is_formula(node.right)
        case ast.BinOp(op=ast.Pow()):
            return _is_formula(node.left) and _is_formula(node.right) and _is_small(node.right)
        case ast.Call(func=ast.Name()):
            named = node.func.id in FUNCTIONS and not node.keywords  # type: ignore[attr-defined]
            return named and all(map(_is_formula, node.args))
    return False


def _is_small(exponent: ast.expr) -> bool:
    if any(isinstance(node, ast.Pow) for node in ast.walk(exponent)):
        return False
    try:
        return abs(value(exponent)) <= LARGEST_EXPONENT
    except NOT_ARITHMETIC:
        return True  # it has a name in it


READABLE: Mapping[str, Rule] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _literal_or_right),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), _formula),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), _formula),
    # A car moves less than ten spaces at a time: the scorer counts them one by one.
    "rush_hour": lambda given, entry: _MOVES.fullmatch(given) is not None,
}
"""By generator, what the scorer may be given; any other answer scores 0."""


def _same_text(given: str, entry: Entry) -> bool:
    """But for case and spaces."""
    answer: str = entry["answer"]
    return "".join(given.casefold().split()) == "".join(answer.casefold().split())


def _same_json(given: str, entry: Entry) -> bool:
    try:
        return bool(json.loads(given) == json.loads(entry["answer"]))
    except (ValueError, RecursionError):
        return False


def _near_probability(given: str, entry: Entry) -> bool:
    """The scorer also takes the first digits for the number, and 0 for any small one."""
    right = float(Fraction(entry["answer"].replace(",", "")))
    try:
        distance = abs(float(Fraction(given.replace(",", ""))) - right)
    except (ValueError, ArithmeticError):
        return False
    return distance <= min(PROBABILITY_TOLERANCE, right / 100)


def _one_fraction(given: str, entry: Entry) -> bool:
    parts = ("simplified_numerator", "simplified_denominator")
    return re.findall(r"\d+", given) == [str(abs(entry["metadata"][part])) for part in parts]


def _one_number(given: str, entry: Entry) -> bool:
    """However often: of "44 or 8" the scorer reads the first, and of -44 no sign."""
    found = {float(number.replace(",", "").replace("−", "-")) for number in _NUMBER.findall(given)}
    return found == {float(entry["answer"])}


def _same_numbers(given: str, entry: Entry) -> bool:
    """The scorer lets each be off by 1."""
    sides = (json.loads(given.replace("'", '"')), ast.literal_eval(entry["answer"]))
    return list(map(float, sides[0])) == list(map(float, sides[1]))


def _all_numbers(given: str, entry: Entry) -> bool:
    """The scorer passes over what it cannot read; without a real solution that may be anything."""
    if not entry["answer"]:
        return given.strip("\"' ") == ""
    try:
        return len([float(part) for part in given.split(",")]) > 0
    except ValueError:
        return False


def _legal_moves(given: str, entry: Entry) -> bool:
    """The scorer passes over moves that a car cannot make."""
    from reasoning_gym.games.rush_hour import Board

    board = Board(entry["metadata"]["board_config"])
    for car, sign, distance in re.findall(r"([A-Z])([+-])(\d)", given):
        for _ in range(int(distance)):
            before = board.mask()
            board.move(car, 1 if sign == "+" else -1)
            if board.mask() == before:
                return False
    return bool(board.solved)


FULL_MARKS: Mapping[str, Rule] = {
    "advanced_geometry": lambda given, entry: given.count(",") == entry["answer"].count(","),
    "coin_flip": _near_probability,
    "complex_arithmetic": lambda given, entry: "nan" not in given.casefold(),
    # The scorer is content with a hundred-thousandth.
    "countdown": lambda given, entry: makes(given, entry["metadata"]["numbers"], entry["metadata"]["target"]),
    "figlet_font": _same_text,
    "fraction_simplification": _one_fraction,
    "game_of_life": _same_json,
    "game_of_life_halting": _same_text,
    "gsm_symbolic": _one_number,
    "letter_jumble": _same_text,
    # The scorer is content with a hundredth, by which another of the candidates may be off.
    "number_format": lambda given, entry: (
        abs(float(given.replace(",", "")) - float(entry["metadata"]["solution"])) <= 1e-6
    ),
    "number_sorting": _same_numbers,
    "polynomial_equations": _all_numbers,
    # The scorer takes any four numbers in the range, and cuts off what is behind the point.
    "puzzle24": lambda given, entry: makes(given, entry["metadata"]["numbers"], 24),
    "quantum_lock": lambda given, entry: re.fullmatch(r"[A-Ca-c\s,→>-]+", given) is not None,
    "rush_hour": _legal_moves,
    # The scorer passes over all that is no step.
    "sokoban": lambda given, entry: re.fullmatch(r"[LRUD\s,]+", given) is not None,
    "spell_backward": _same_text,
    "time_intervals": lambda given, entry: _DURATION.fullmatch(given.strip()) is not None,
    "word_sorting": lambda given, entry: (
        [word.strip() for word in given.split(",")] == entry["metadata"]["sorted_words"]
    ),
}
"""By generator, what must hold too where the scorer gives 1 or more; else the answer scores 0."""


def may_be_scored(generator: str, given: str, entry: Entry) -> bool:
    """Whether the library's scorer may see an answer."""
    return generator not in READABLE or READABLE[generator](given, entry)


def deserves_full_marks(generator: str, given: str, entry: Entry) -> bool:
    """Whether an answer that the library's scorer takes for right is right."""
    return generator not in FULL_MARKS or FULL_MARKS[generator](given, entry)
