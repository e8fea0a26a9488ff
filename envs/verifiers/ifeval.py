"""IFEval (Zhou et al. 2023): which instructions a response follows, strictly and loosely."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.verifiers import language, sentences
from envs.verifiers.ifeval_rules import LANGUAGE_RULES, NEEDED_ARGUMENTS, RULES, SENTENCE_RULES

MAX_CHARACTERS = 100_000
"""A longer response follows nothing."""


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
    """The instructions of one row of the data set; arguments that are None (hub version) are left out.

    Raises:
        ValueError: an unknown id, another number of arguments than ids, or an argument that is missing.
    """
    if len(ids) != len(arguments) or not ids:
        raise ValueError(f"{len(ids)} instruction ids with {len(arguments)} sets of arguments")
    made = []
    for name, given in zip(ids, arguments, strict=True):
        if name not in RULES:
            raise ValueError(f"unknown instruction {name!r}")
        known = {key: value for key, value in (given or {}).items() if value is not None}
        missing = [key for key in NEEDED_ARGUMENTS.get(name, ()) if key not in known]
        if missing:
            raise ValueError(f"instruction {name!r} needs the argument {missing[0]!r}")
        made.append(Instruction(name, known))
    return tuple(made)


def follows(response: str, instruction: Instruction) -> bool:
    """Strictly: the response as it is. An empty response follows nothing."""
    if not response.strip() or len(response) > MAX_CHARACTERS:
        return False
    return RULES[instruction.id](response, instruction.arguments)


def variants(response: str) -> tuple[str, ...]:
    """The readings of a response that loose judging allows: without its first line, its last line, both or neither,
    and asterisks or not; the response itself first."""
    lines = response.split("\n")
    cut = (
        response,
        "\n".join(lines[1:]).strip(),
        "\n".join(lines[:-1]).strip(),
        "\n".join(lines[1:-1]).strip(),
    )
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
