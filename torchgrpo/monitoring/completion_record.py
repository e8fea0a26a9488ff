"""Conversion between completions and their objects in a line of the ledger.

Turns, starts of sequences and messages are lists of JSON texts. A field of a line has the same type in all lines, while
the arguments of tool calls differ, and Arrow's reader cannot turn the type of an empty list into a list of objects.
This module does not import torch.
"""

import json
from dataclasses import fields
from typing import Any

from envs.example import Completion
from envs.group import SampledCompletion, SequenceStart, Turn, Verdict


def completion_to_record(completion: SampledCompletion) -> SampledCompletion | dict[str, Any]:
    """Returns a completion as orjson writes it, itself unless it has fields of an episode."""
    reward_input = completion.reward_input
    has_messages = completion.turns or (reward_input is not None and reward_input.turns)
    if not has_messages and not completion.sequence_starts and not completion.error:
        return completion
    record = {entry.name: getattr(completion, entry.name) for entry in fields(SampledCompletion)}
    record["sequence_starts"] = [_to_text(_field_values(one)) for one in completion.sequence_starts]
    record["turns"] = [_to_text(_field_values(turn)) for turn in completion.turns]
    if reward_input is not None:
        record["reward_input"] = vars(reward_input) | {"turns": [_to_text(message) for message in reward_input.turns]}
    # An exception may hold bytes of a file name that are not UTF-8, as lone surrogates.
    return record | {"error": completion.error.encode(errors="backslashreplace").decode()}


def _field_values(entry: SequenceStart | Turn) -> dict[str, Any]:
    return {one.name: getattr(entry, one.name) for one in fields(entry)}


def _to_text(value: Any) -> str:
    """Returns JSON in ASCII, since the arguments of a call may hold lone surrogates."""
    return json.dumps(value, default=str)


def parse_sequence_starts(record: dict[str, Any]) -> list[SequenceStart]:
    """Returns the starts of the sequences of a completion in a record of the ledger."""
    starts = [json.loads(text) for text in record["sequence_starts"]]
    return [SequenceStart(one["start"], tuple(one["prompt"])) for one in starts]


def parse_turns(record: dict[str, Any]) -> list[Turn]:
    """Returns the turns of a completion in a record of the ledger."""
    turns = [json.loads(text) for text in record["turns"]]
    tuples = ("replies", "opening", "tool_outcomes")
    return [Turn(**turn | {name: tuple(turn[name]) for name in tuples}) for turn in turns]


def parse_reward_input(record: dict[str, Any]) -> Completion:
    """Returns the input of the reward of a completion in a record of the ledger."""
    values = record["reward_input"]
    return Completion(**values | {"turns": tuple(json.loads(message) for message in values.get("turns", ()))})


def parse_completion(record: dict[str, Any]) -> SampledCompletion:
    """Returns a completion in a record of the ledger."""
    values = {entry.name: record[entry.name] for entry in fields(SampledCompletion)}
    verdict = {entry.name: record["verdict"][entry.name] for entry in fields(Verdict) if entry.init}
    return SampledCompletion(
        **values
        | {
            "reward_input": parse_reward_input(record),
            "verdict": Verdict(**verdict),
            "sequence_starts": parse_sequence_starts(record),
            "turns": parse_turns(record),
        }
    )
