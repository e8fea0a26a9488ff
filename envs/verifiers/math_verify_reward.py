"""Rewards by math-verify; `strict_math_verify` also requires the reference answer's form and simplification.

`math_verify` is the library alone. The library reads more notations than our own rules and is less strict: it takes
`8+3` for 11, `0.333333` for a third, a set for a point, `2x=22` for 22. `strict_math_verify` therefore accepts an
answer only if it also has the variables, words and brackets of the reference answer and as many numbers, and the
numbers are simplified as far. If the reference answer is a single number, our own rules decide.
"""

import re

from config.schema.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.verifiers import compat
from envs.verifiers.elements import without_names
from envs.verifiers.equivalence import MAX_FORMULA_CHARACTERS, is_closed, same_answer
from envs.verifiers.equivalence import warm_up as warm_up_formulas
from envs.verifiers.extract import chain_end, claim_in_sentence, joined_boxes
from envs.verifiers.latex import canonical_text, strip_brackets
from envs.verifiers.numbers import parse_number
from envs.verifiers.rules import BOXED_PROMPT, extract_final_answer
from envs.verifiers.simplification import read_form
from envs.verifiers.text_references import is_compared_as_text, text_elements
from envs.verifiers.units import split_unit

_SEPARATOR = re.compile(
    r"\\(?:cup|cap|leq|geq|neq|setminus)(?![a-z])|\\in(?![a-z])|\\\\|\\(?:begin|end)\{\w+\}|[,;<>=&]| ?(?:and|or) ?"
)
_UNSUPPORTED_NOTATION = re.compile(r"\\(?:sum|prod|int|lim|pm|mp)(?![a-z])|:")
"""Notations for which the library's verdict is unusable: it ignores bounds, signs or the second part."""
_WORD = re.compile(r"[a-zA-Z]\([^()]*\)|[a-zA-Z]+|_(?:\w|\{[^{}]*\})")
_PRIMED_LETTER = re.compile(r"([a-zA-Z])('+)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_FORMULA_MARK = re.compile(r"\$|\\\(|\\\[|\\boxed")
"""Marks of a formula for the library; a reference answer without a mark is put in dollars."""
_OPENING = {")": "(", "]": "[", "}": "{"}
_CLOSING = {opening: closing for closing, opening in _OPENING.items()}


def strictly_same_answer(final_answer: str, reference: str) -> bool:
    """Whether the library accepts a final answer that is simplified as far as the reference."""
    final_answer = joined_boxes(final_answer) or "" if "\\boxed" in final_answer else final_answer
    reference = joined_boxes(reference) or reference if "\\boxed" in reference else reference
    if max(len(final_answer), len(reference)) > MAX_FORMULA_CHARACTERS:
        return False
    left, right = without_names(canonical_text(claim_in_sentence(final_answer)), canonical_text(reference))
    value, _ = split_unit(right)
    is_number = parse_number(value) is not None and "," not in value
    if not left or is_number or is_compared_as_text(final_answer, reference) or text_elements(reference):
        return same_answer(final_answer, reference)  # numbers and texts do not need the library
    left = chain_end(left) if "=" not in right else left
    first, second = (_PRIMED_LETTER.sub(_write_primes_as_index, text) for text in (left, right))
    if "'" in first + second or '"' in first + second:
        return same_answer(final_answer, reference)
    if _UNSUPPORTED_NOTATION.search(left + right) or not _is_same_kind(first, second):
        return False
    if not has_simplified_numbers(first, second):
        return False
    first, second = (
        _PRIMED_LETTER.sub(lambda primes: f"({_write_primes_as_index(primes)})", text) for text in (left, right)
    )
    return compat.math_verify(f"\\boxed{{{first}}}", second, in_dollars=True)


def _write_primes_as_index(primes: re.Match[str]) -> str:
    """Writes the primes of a letter as an index, since the library ignores primes."""
    return f"{primes[1]}_{{9{len(primes[2])}}}"


def _is_same_kind(left: str, right: str) -> bool:
    """Whether two canonical texts have the same variables, words, indices and outer brackets.

    Units that only one text has do not count.
    """
    (left, unit), (right, reference_unit) = split_unit(left), split_unit(right)
    if unit and reference_unit and unit != reference_unit:
        return False
    words = [set(_WORD.findall(_COMMAND.sub(" ", text))) for text in (left, right)]
    return words[0] == words[1] and _outer_brackets(left) == _outer_brackets(right)


def has_simplified_numbers(left: str, right: str) -> bool:
    """Whether the numbers of an answer are simplified as far as the reference answer's numbers.

    Both texts are canonical. The numbers must be equally many, and decimals exactly equal. A reference answer
    without numbers, or with a number in an unknown notation, has no such requirement.
    """
    reference_numbers, answer_numbers = _split_numbers(right), _split_numbers(left)
    if len(reference_numbers) != len(answer_numbers):
        return False
    exact = {parse_number(number) for number in reference_numbers}
    if any("." in number and parse_number(number) not in exact for number in answer_numbers):
        return False
    reference_forms, answer_forms = (
        [read_form(number) for number in reference_numbers],
        [read_form(number) for number in answer_numbers],
    )
    if None in reference_forms:
        return True
    if None in answer_forms:
        return False
    num_operations, allowed_work = (
        sum(form.operations for form in each if form) for each in (answer_forms, reference_forms)
    )
    is_reduced = all(form.is_reduced for form in answer_forms if form) or not all(
        form.is_reduced for form in reference_forms if form
    )
    return num_operations <= allowed_work and is_reduced


def _split_numbers(text: str) -> list[str]:
    """Returns the numbers of a list, an interval, a relation or a matrix.

    Units are removed; infinity is not a number.
    """
    pieces = (_balance_brackets(piece) for piece in _SEPARATOR.split(text))
    numbers = (split_unit(piece)[0] for piece in pieces)
    return [number for number in numbers if number.strip("+-") not in ("", "\\infty") and is_closed(number)]


def _balance_brackets(piece: str) -> str:
    """Removes the brackets that a piece has from the enclosing list."""
    piece = piece.strip().removeprefix("\\{")
    while piece and piece[0] in _CLOSING and piece.count(piece[0]) > piece.count(_CLOSING[piece[0]]):
        piece = piece[1:].lstrip()
    while piece and piece[-1] in _OPENING and piece.count(piece[-1]) > piece.count(_OPENING[piece[-1]]):
        piece = piece[:-1].rstrip("\\ ")
    return strip_brackets(piece)


def _outer_brackets(text: str) -> str:
    """Returns the brackets around a whole list, or an empty text.

    A single number has no such brackets, and the braces of a set do not count.
    """
    if "," not in text or text[:1] not in ("(", "["):
        return ""
    return text[0] + text[-1]


def warm_up() -> None:
    """Imports the library and the modules that its first formula needs."""
    warm_up_formulas()
    compat.math_verify("\\boxed{2x}", "x+x", in_dollars=True)


@reward("math_verify", system_prompt=BOXED_PROMPT, warm_up=warm_up)
def math_verify(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """Scores 1 if the library, called as in its manual, finds the reference answer."""
    reference = str(example.answer)
    is_right = compat.math_verify(completion.text, reference, in_dollars=_FORMULA_MARK.search(reference) is None)
    return Reward(float(is_right), {"accuracy": float(is_right)})


@reward("strict_math_verify", system_prompt=BOXED_PROMPT, warm_up=warm_up)
def strict_math_verify(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """Scores 1 if the library accepts the final answer, and the answer is simplified.

    The final answer is the one that the reward `math` reads.
    """
    final_answer = extract_final_answer(completion.full_text)
    is_right = final_answer is not None and strictly_same_answer(final_answer, str(example.answer))
    return Reward(float(is_right), {"accuracy": float(is_right), "format": float(final_answer is not None)})
