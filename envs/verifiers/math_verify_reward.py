"""The rewards `math_verify`, the library as it is, and `strict_math_verify`, held to our rules.

The library reads more notations than our own rules and is less strict: it takes `8+3` for 11, `0.333333` for a third, a
set for a point, `2x=22` for 22. What it accepts in `strict_math_verify` must therefore have the gold's variables, words
and brackets and as many numbers, and these leave no more to be done. Where the gold is one number our own rules decide.
"""

import re

from config.schema.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.verifiers import compat
from envs.verifiers.elements import without_names
from envs.verifiers.equivalence import MAX_FORMULA_CHARACTERS, is_closed, same_answer
from envs.verifiers.equivalence import warm_up as warm_up_formulas
from envs.verifiers.extract import boxed_together, chain_end, from_prose
from envs.verifiers.latex import canonical, without_brackets
from envs.verifiers.numbers import parse_number
from envs.verifiers.rules import BOXED_PROMPT, said
from envs.verifiers.text_golds import as_written, listed
from envs.verifiers.units import split_unit
from envs.verifiers.worked_out import read

_BETWEEN = re.compile(
    r"\\(?:cup|cap|leq|geq|neq|setminus)(?![a-z])|\\in(?![a-z])|\\\\|\\(?:begin|end)\{\w+\}|[,;<>=&]| ?(?:and|or) ?"
)
_NEVER = re.compile(r"\\(?:sum|prod|int|lim|pm|mp)(?![a-z])|:")
"""Where the library gives no verdict worth having: it leaves bounds, signs or the second part out of account."""
_WORD = re.compile(r"[a-zA-Z]\([^()]*\)|[a-zA-Z]+|_(?:\w|\{[^{}]*\})")
_PRIMED = re.compile(r"([a-zA-Z])('+)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")
"""What tells the library where a formula is; a gold without it is put in dollars."""
_OPENING = {")": "(", "]": "[", "}": "{"}
_CLOSING = {opening: closing for closing, opening in _OPENING.items()}


def strictly_same(given: str, gold: str) -> bool:
    """Whether the library takes a final answer for the gold, and nothing in it is left to be worked out."""
    given = boxed_together(given) or "" if "\\boxed" in given else given
    gold = boxed_together(gold) or gold if "\\boxed" in gold else gold
    if max(len(given), len(gold)) > MAX_FORMULA_CHARACTERS:
        return False
    left, right = without_names(canonical(from_prose(given)), canonical(gold))
    value, _ = split_unit(right)
    is_number = parse_number(value) is not None and "," not in value
    if not left or is_number or as_written(given, gold) or listed(gold):
        return same_answer(given, gold)  # a number has one value, which needs no library, and a text none
    left = chain_end(left) if "=" not in right else left
    first, second = (_PRIMED.sub(_as_index, text) for text in (left, right))
    if "'" in first + second or '"' in first + second:
        return same_answer(given, gold)
    if _NEVER.search(left + right) or not _of_one_kind(first, second):
        return False
    if not nothing_left_to_do(first, second):
        return False
    first, second = (_PRIMED.sub(lambda found: f"({_as_index(found)})", text) for text in (left, right))
    return compat.math_verify(f"\\boxed{{{first}}}", second, in_dollars=True)


def _as_index(found: re.Match[str]) -> str:
    """Write primes of a letter as an index, for the library ignores primes."""
    return f"{found[1]}_{{9{len(found[2])}}}"


def _of_one_kind(left: str, right: str) -> bool:
    """Whether two canonical texts have the same variables, words and indices, units aside, in the same brackets."""
    (left, unit), (right, wanted) = split_unit(left), split_unit(right)
    if unit and wanted and unit != wanted:
        return False
    words = [set(_WORD.findall(_COMMAND.sub(" ", text))) for text in (left, right)]
    return words[0] == words[1] and _outside(left) == _outside(right)


def nothing_left_to_do(left: str, right: str) -> bool:
    """Whether the numbers of an answer are as many as the gold's and as far worked out, decimals exactly the same.

    Both are canonical. A gold without numbers, or with one in a notation that is not known here, asks for nothing.
    """
    wanted, found = _numbers(right), _numbers(left)
    if len(wanted) != len(found):
        return False
    exact = {parse_number(number) for number in wanted}
    if any("." in number and parse_number(number) not in exact for number in found):
        return False
    golds, forms = [read(number) for number in wanted], [read(number) for number in found]
    if None in golds:
        return True
    if None in forms:
        return False
    work, allowed = (sum(form.work for form in each if form) for each in (forms, golds))
    reduced = all(form.reduced for form in forms if form) or not all(form.reduced for form in golds if form)
    return work <= allowed and reduced


def _numbers(text: str) -> list[str]:
    """The numbers of a list, an interval, a relation or a matrix, units cut off; infinity is none."""
    pieces = (_balanced(piece) for piece in _BETWEEN.split(text))
    numbers = (split_unit(piece)[0] for piece in pieces)
    return [number for number in numbers if number.strip("+-") not in ("", "\\infty") and is_closed(number)]


def _balanced(piece: str) -> str:
    """Without the brackets of the list that it was cut out of."""
    piece = piece.strip().removeprefix("\\{")
    while piece and piece[0] in _CLOSING and piece.count(piece[0]) > piece.count(_CLOSING[piece[0]]):
        piece = piece[1:].lstrip()
    while piece and piece[-1] in _OPENING and piece.count(piece[-1]) > piece.count(_OPENING[piece[-1]]):
        piece = piece[:-1].rstrip("\\ ")
    return without_brackets(piece)


def _outside(text: str) -> str:
    """The brackets around all of a list; none around one number, and those of a set are as good as none."""
    if "," not in text or text[:1] not in ("(", "["):
        return ""
    return text[0] + text[-1]


def warm_up() -> None:
    """Import the library, and what it imports with its first formula."""
    warm_up_formulas()
    compat.math_verify("\\boxed{2x}", "x+x", in_dollars=True)


@reward("math_verify", system_prompt=BOXED_PROMPT, warm_up=warm_up)
def math_verify(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """1 where the library, called as its manual does, finds the gold in the completion."""
    gold = str(example.answer)
    right = compat.math_verify(completion.text, gold, in_dollars=_MARKED.search(gold) is None)
    return Reward(float(right), {"accuracy": float(right)})


@reward("strict_math_verify", system_prompt=BOXED_PROMPT, warm_up=warm_up)
def strict_math_verify(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """1 where the library takes the final answer, read as the reward `math` reads it, for the gold, worked out."""
    given = said(completion.full_text)
    right = given is not None and strictly_same(given, str(example.answer))
    return Reward(float(right), {"accuracy": float(right), "format": float(given is not None)})
