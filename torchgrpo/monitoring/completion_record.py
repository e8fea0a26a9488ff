"""Conversion between completions and their objects in a line of the ledger.

The messages of turns are JSON texts: the arguments of tool calls differ in names and types, while a field of a line has
the same type in all lines. This module does not import torch.
"""

import json
from dataclasses import fields
from typing import Any

from envs.example import Completion, Message
from envs.group import SampledCompletion, SequenceStart, Turn, Verdict


def completion_to_record(completion: SampledCompletion) -> SampledCompletion | dict[str, Any]:
    """Returns a completion as orjson writes it; without messages and error this is the completion itself."""
    reward_input = completion.reward_input
    has_messages = completion.turns or (reward_input is not None and reward_input.turns)
    if not has_messages and not completion.error:
        return completion
    record = {entry.name: getattr(completion, entry.name) for entry in fields(SampledCompletion)}
    record["turns"] = [
        {entry.name: getattr(turn, entry.name) for entry in fields(Turn)}
        | {"message": _message_to_text(turn.message), "replies": [*map(_message_to_text, turn.replies)]}
        for turn in completion.turns
    ]
    if reward_input is not None:
        turns = [_message_to_text(message) for message in reward_input.turns]
        record["reward_input"] = vars(reward_input) | {"turns": turns}
    # An exception may hold bytes of a file name that are not UTF-8, as lone surrogates.
    return record | {"error": completion.error.encode(errors="backslashreplace").decode()}


def _message_to_text(message: Message) -> str:
    """Returns a message as JSON; ASCII, since the arguments of a call may hold lone surrogates."""
    return json.dumps(message, default=str)


def parse_sequence_starts(record: dict[str, Any]) -> list[SequenceStart]:
    """Returns the starts of the sequences of a completion in a record of the ledger."""
    return [SequenceStart(one["start"], tuple(one["prompt"])) for one in record["sequence_starts"]]


def parse_turns(record: dict[str, Any]) -> list[Turn]:
    """Returns the turns of a completion in a record of the ledger."""
    return [
        Turn(
            **turn
            | {
                "message": json.loads(turn["message"]),
                "replies": tuple(json.loads(reply) for reply in turn["replies"]),
                "tool_outcomes": tuple(turn["tool_outcomes"]),
            }
        )
        for turn in record["turns"]
    ]


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
