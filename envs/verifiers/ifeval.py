"""IFEval (Zhou et al. 2023) and IFBench (Pyatkin et al. 2025): what a response follows, strictly and loosely."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.verifiers import ifbench_rules, ifeval_rules, language, sentences
from envs.verifiers.english import word_set
from envs.verifiers.ifeval_rules import LANGUAGE_RULES, Rule

RULES: Mapping[str, Rule] = {**ifeval_rules.RULES, **ifbench_rules.RULES}
"""Every instruction that is known, by its id."""
NEEDED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **ifeval_rules.NEEDED_ARGUMENTS,
    **ifbench_rules.NEEDED_ARGUMENTS,
}
SENTENCE_RULES = ifeval_rules.SENTENCE_RULES | ifbench_rules.SENTENCE_RULES
"""Instructions that need NLTK's sentence data."""
MAX_CHARACTERS = 100_000
"""A longer response follows nothing."""
MAX_SENTENCE_CHARACTERS = 40_000
"""Punkt takes quadratic time on hostile text; a longer response follows no rule about sentences."""

_LISTS = ("keywords", "forbidden_words")
_TEXTS = word_set(
    """
    keyword letter language first_word postscript_marker section_spliter end_phrase relation let_relation
    capital_relation prompt_to_repeat reference_text word options sep keyword1 keyword2 keyword3 keyword4 keyword5
    """
)
"""Arguments that are texts; what is no list beside them is a whole number."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a prompt: an id of `RULES` and its arguments."""

    id: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Followed:
    """Whether each instruction of a prompt is followed, in the prompt's order."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def instructions(
    ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]
) -> tuple[Instruction, ...]:
    """The instructions of one row of the data set; arguments that they do not read are left out (the hubs have None).

    Raises:
        ValueError: an unknown id, another number of arguments than ids, an argument that is missing or of another kind.
    """
    if len(ids) != len(arguments) or not ids:
        raise ValueError(f"{len(ids)} instruction ids with {len(arguments)} sets of arguments")
    made = []
    for name, given in zip(ids, arguments, strict=True):
        if name not in RULES:
            raise ValueError(f"unknown instruction {name!r}")
        needed = NEEDED_ARGUMENTS.get(name, ())
        made.append(Instruction(name, {key: _argument(name, key, (given or {}).get(key)) for key in needed}))
    return tuple(made)


def _argument(name: str, key: str, value: Any) -> Any:
    """As the rule reads it: numbers are whole, also where the data has 5.0."""
    if value is None:
        raise ValueError(f"instruction {name!r} needs the argument {key!r}")
    if key in _LISTS:
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        kind, right = "a list of texts", texts
    elif key in _TEXTS:
        kind, right = "a text", isinstance(value, str) and value.strip() != ""
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        kind, right = "a whole number from 0", number and value >= 0 and float(value).is_integer()
    if not right:
        raise ValueError(f"instruction {name!r}: {key!r} must be {kind}, it is {value!r}")
    return int(value) if isinstance(value, float) else value


def follows(response: str, instruction: Instruction) -> bool:
    """Strictly: the response as it is. An empty response follows nothing."""
    if not response.strip() or len(response) > MAX_CHARACTERS:
        return False
    if instruction.id in SENTENCE_RULES and len(response) > MAX_SENTENCE_CHARACTERS:
        return False
    return RULES[instruction.id](response, instruction.arguments)


def variants(response: str) -> tuple[str, ...]:
    """The readings of a response that loose judging allows: without its first line, its last line, both or neither,
    and asterisks or not; the response itself first."""
    lines = response.split("\n")
    cut = (response, *("\n".join(kept).strip() for kept in (lines[1:], lines[:-1], lines[1:-1])))
    return tuple(dict.fromkeys((*cut, *(text.replace("*", "") for text in cut))))


def judge(response: str, given: Sequence[Instruction]) -> Followed:
    """Both, for every instruction: loosely, where one of the response's variants follows it."""
    strict = tuple(follows(response, instruction) for instruction in given)
    loose = tuple(
        followed or any(follows(variant, instruction) for variant in variants(response))
        for followed, instruction in zip(strict, given, strict=True)
    )
    return Followed(strict, loose)


def load_models(given: Sequence[Instruction]) -> None:
    """Load what the instructions need, so that a missing package or model stops the start and not a worker.

    Raises:
        ConfigError: names what is missing and how to get it.
    """
    ids = {instruction.id for instruction in given}
    if ids & SENTENCE_RULES:
        sentences.load()
    if ids & LANGUAGE_RULES:
        language.load()
