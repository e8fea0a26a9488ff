"""Parses instructions of IFEval and IFBench, and checks responses against them strictly and loosely.

The verdicts are strict, about the response itself, and loose, about its `loose_variants`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.verifiers import ifbench_rules, ifeval_rules, language_detection, sentences
from envs.verifiers.english import word_set
from envs.verifiers.ifeval_rules import LANGUAGE_RULES, InstructionRule

RULES: Mapping[str, InstructionRule] = {**ifeval_rules.RULES, **ifbench_rules.RULES}
"""Rule of every known instruction by id."""
NEEDED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {**ifeval_rules.NEEDED_ARGUMENTS, **ifbench_rules.NEEDED_ARGUMENTS}
"""Arguments that every rule reads; a rule without arguments is not listed."""
SENTENCE_RULES = ifeval_rules.SENTENCE_RULES | ifbench_rules.SENTENCE_RULES
"""Instructions that need NLTK's sentence data."""
MAX_CHARACTERS = 100_000
"""Maximum length of a response; a longer response follows no instruction."""
MAX_SENTENCE_CHARACTERS = 40_000
"""Maximum length of a response for rules about sentences, since Punkt takes quadratic time on hostile text."""

_LISTS = ("keywords", "forbidden_words")
"""Arguments that are lists of texts."""
_TEXTS = word_set(
    """
    keyword letter language first_word postscript_marker section_spliter end_phrase relation let_relation
    capital_relation prompt_to_repeat reference_text word options sep keyword1 keyword2 keyword3 keyword4 keyword5
    """
)
"""Arguments that are texts; the arguments beside lists and texts are whole numbers."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a prompt: an id of `RULES` and its arguments."""

    id: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class InstructionVerdicts:
    """Whether a response follows the instructions of a prompt, in the prompt's order."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def parse_instructions(ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]) -> tuple[Instruction, ...]:
    """Parses the instructions of one row of the data set.

    Arguments that a rule does not read are left out (the hubs have None for them).

    Raises:
        ValueError: An id is unknown, the numbers of ids and arguments differ, or an argument is missing or of
            another kind.
    """
    if len(ids) != len(arguments) or not ids:
        raise ValueError(f"{len(ids)} instruction ids with {len(arguments)} sets of arguments")
    parsed_instructions = []
    for name, raw_arguments in zip(ids, arguments, strict=True):
        if name not in RULES:
            raise ValueError(f"unknown instruction {name!r}")
        needed = NEEDED_ARGUMENTS.get(name, ())
        parsed_instructions.append(
            Instruction(name, {key: _parse_argument(name, key, (raw_arguments or {}).get(key)) for key in needed})
        )
    return tuple(parsed_instructions)


def _parse_argument(name: str, key: str, value: Any) -> Any:
    """Checks the type of an argument, and converts a number such as 5.0 to int.

    Raises:
        ValueError: The argument is missing or has another type.
    """
    if value is None:
        raise ValueError(f"instruction {name!r} needs the argument {key!r}")
    if key in _LISTS:
        is_text_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        kind, is_valid = "a list of texts", is_text_list
    elif key in _TEXTS:
        kind, is_valid = "a text", isinstance(value, str) and value.strip() != ""
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        kind, is_valid = "a whole number from 0", is_number and value >= 0 and float(value).is_integer()
    if not is_valid:
        raise ValueError(f"instruction {name!r}: {key!r} must be {kind}, but is {value!r}")
    return int(value) if isinstance(value, float) else value


def follows_instruction(response: str, instruction: Instruction) -> bool:
    """Whether a response, as it is, follows an instruction. An empty response follows no instruction."""
    if not response.strip() or len(response) > MAX_CHARACTERS:
        return False
    if instruction.id in SENTENCE_RULES and len(response) > MAX_SENTENCE_CHARACTERS:
        return False
    return RULES[instruction.id](response, instruction.arguments)


def loose_variants(response: str) -> tuple[str, ...]:
    """Returns the variants of a response for the loose verdict, the response itself first.

    The variants lack the first line, the last line, both or neither, and have asterisks or not.
    """
    lines = response.split("\n")
    shortened = (response, *("\n".join(lines_kept).strip() for lines_kept in (lines[1:], lines[:-1], lines[1:-1])))
    return tuple(dict.fromkeys((*shortened, *(text.replace("*", "") for text in shortened))))


def check_instructions(response: str, instructions: Sequence[Instruction]) -> InstructionVerdicts:
    """Checks a response against every instruction, strictly and loosely.

    The loose verdict is true if one of the response's variants follows the instruction.
    """
    strict = tuple(follows_instruction(response, instruction) for instruction in instructions)
    loose = tuple(
        is_strict_follow or any(follows_instruction(variant, instruction) for variant in loose_variants(response))
        for is_strict_follow, instruction in zip(strict, instructions, strict=True)
    )
    return InstructionVerdicts(strict, loose)


def load_text_models(instructions: Sequence[Instruction]) -> None:
    """Loads the sentence and language models that the instructions need.

    A missing package or model thus stops the start, and not a worker later.

    Raises:
        ConfigError: A package or model is missing; the message names the command that installs it.
    """
    ids = {instruction.id for instruction in instructions}
    if ids & SENTENCE_RULES:
        sentences.load_punkt()
    if ids & LANGUAGE_RULES:
        language_detection.load_detector()
