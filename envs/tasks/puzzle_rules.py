"""Rules that guard the scorers of reasoning-gym (0.1.19) against unsafe and wrong answers.

Some scorers evaluate the answer as Python, so only literals and formulas are passed to them. Some scorers give the full
score to wrong answers, so these answers must also satisfy a rule of this module.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from envs.verifiers.expressions import EVALUATION_ERRORS, evaluate, parse_expression, reaches_target

PuzzleEntry = Mapping[str, Any]
AnswerRule = Callable[[str, PuzzleEntry], bool]

FUNCTIONS = frozenset(
    (
        *("Abs", "abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp"),
        *("ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)
MAX_EXPONENT = 1000
PROBABILITY_TOLERANCE = 1e-4
"""Tolerance of the library's scorer for `coin_flip`."""
_NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?")
_DURATION = re.compile(r"(?:\d+ days?)?(?:(?<=[a-z]), )?(?:\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?")
_MOVES = re.compile(r"(?:[A-Z][+-]\d[\s,]*)+")


def _is_literal_or_reference(answer_text: str, entry: PuzzleEntry) -> bool:
    references = (entry["answer"], *entry["metadata"].get("valid_answers", ()))
    if answer_text in (text.strip() for text in references if text):
        return True
    try:
        ast.literal_eval(answer_text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_formula_text(answer_text: str, entry: PuzzleEntry) -> bool:
    try:
        return _is_formula(parse_expression(answer_text.strip()))
    except EVALUATION_ERRORS:
        return False


def _is_formula(node: ast.expr) -> bool:
    """Whether an expression has only arithmetic, names, small powers, and functions of analysis."""
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
            is_known = node.func.id in FUNCTIONS and not node.keywords  # type: ignore[attr-defined]
            return is_known and all(map(_is_formula, node.args))
    return False


def _is_small(exponent: ast.expr) -> bool:
    """Whether an exponent has no power and at most `MAX_EXPONENT` as absolute value."""
    if any(isinstance(node, ast.Pow) for node in ast.walk(exponent)):
        return False
    try:
        return abs(evaluate(exponent)) <= MAX_EXPONENT
    except EVALUATION_ERRORS:
        return True  # an exponent with a name


SCORABLE_RULES: Mapping[str, AnswerRule] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _is_literal_or_reference),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), _is_formula_text),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), _is_formula_text),
    # A car moves less than ten spaces at a time, since the scorer counts spaces one by one.
    "rush_hour": lambda answer_text, entry: _MOVES.fullmatch(answer_text) is not None,
}
"""By generator, the rule of answers that the scorer can read; any other answer scores 0."""


def _same_text(answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether the texts are equal up to case and spaces."""
    answer: str = entry["answer"]
    return "".join(answer_text.casefold().split()) == "".join(answer.casefold().split())


def _same_json(answer_text: str, entry: PuzzleEntry) -> bool:
    try:
        return bool(json.loads(answer_text) == json.loads(entry["answer"]))
    except (ValueError, RecursionError):
        return False


def _near_probability(answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether a probability is close to the reference answer.

    The scorer also accepts the first digits of the number, and 0 for any small number.
    """
    reference = float(Fraction(entry["answer"].replace(",", "")))
    try:
        distance = abs(float(Fraction(answer_text.replace(",", ""))) - reference)
    except (ValueError, ArithmeticError):
        return False
    return distance <= min(PROBABILITY_TOLERANCE, reference / 100)


def _is_reduced_fraction(answer_text: str, entry: PuzzleEntry) -> bool:
    keys = ("simplified_numerator", "simplified_denominator")
    return re.findall(r"\d+", answer_text) == [str(abs(entry["metadata"][key])) for key in keys]


def _has_one_number(answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether the reference number is the only number in the answer.

    The scorer reads only the first number of "44 or 8", and no sign of -44.
    """
    numbers = {float(number.replace(",", "").replace("−", "-")) for number in _NUMBER.findall(answer_text)}
    return numbers == {float(entry["answer"])}


def _same_numbers(answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether the lists of numbers are equal; the scorer accepts differences of 1."""
    sides = (json.loads(answer_text.replace("'", '"')), ast.literal_eval(entry["answer"]))
    return list(map(float, sides[0])) == list(map(float, sides[1]))


def _has_only_numbers(answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether the answer is a list of numbers only; the scorer skips other text.

    If the equation has no real solution, the answer must be empty.
    """
    if not entry["answer"]:
        return answer_text.strip("\"' ") == ""
    try:
        return len([float(part) for part in answer_text.split(",")]) > 0
    except ValueError:
        return False


def _has_legal_moves(answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether legal moves alone solve the board; the scorer skips illegal moves."""
    from reasoning_gym.games.rush_hour import Board

    board = Board(entry["metadata"]["board_config"])
    for car, sign, distance in re.findall(r"([A-Z])([+-])(\d)", answer_text):
        for _ in range(int(distance)):
            before = board.mask()
            board.move(car, 1 if sign == "+" else -1)
            if board.mask() == before:
                return False
    return bool(board.solved)


FULL_SCORE_RULES: Mapping[str, AnswerRule] = {
    "advanced_geometry": lambda answer_text, entry: answer_text.count(",") == entry["answer"].count(","),
    "coin_flip": _near_probability,
    "complex_arithmetic": lambda answer_text, entry: "nan" not in answer_text.casefold(),
    # The scorer accepts a deviation of 1e-5.
    "countdown": lambda answer_text, entry: reaches_target(
        answer_text, entry["metadata"]["numbers"], entry["metadata"]["target"]
    ),
    "figlet_font": _same_text,
    "fraction_simplification": _is_reduced_fraction,
    "game_of_life": _same_json,
    "game_of_life_halting": _same_text,
    "gsm_symbolic": _has_one_number,
    "letter_jumble": _same_text,
    # The scorer accepts a deviation of 0.01, within which another candidate may lie.
    "number_format": lambda answer_text, entry: (
        abs(float(answer_text.replace(",", "")) - float(entry["metadata"]["solution"])) <= 1e-6
    ),
    "number_sorting": _same_numbers,
    "polynomial_equations": _has_only_numbers,
    # The scorer accepts any four numbers in the range, and truncates the value to a whole number.
    "puzzle24": lambda answer_text, entry: reaches_target(answer_text, entry["metadata"]["numbers"], 24),
    "quantum_lock": lambda answer_text, entry: re.fullmatch(r"[A-Ca-c\s,→>-]+", answer_text) is not None,
    "rush_hour": _has_legal_moves,
    # The scorer skips text that is no step.
    "sokoban": lambda answer_text, entry: re.fullmatch(r"[LRUD\s,]+", answer_text) is not None,
    "spell_backward": _same_text,
    "time_intervals": lambda answer_text, entry: _DURATION.fullmatch(answer_text.strip()) is not None,
    "word_sorting": lambda answer_text, entry: (
        [word.strip() for word in answer_text.split(",")] == entry["metadata"]["sorted_words"]
    ),
}
"""By generator, the additional rule of answers with a library score of at least 1; other answers score 0."""


def can_be_scored(generator: str, answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether an answer may be passed to the library's scorer."""
    return generator not in SCORABLE_RULES or SCORABLE_RULES[generator](answer_text, entry)


def deserves_full_score(generator: str, answer_text: str, entry: PuzzleEntry) -> bool:
    """Whether an answer with the full score of the library's scorer is correct."""
    return generator not in FULL_SCORE_RULES or FULL_SCORE_RULES[generator](answer_text, entry)
