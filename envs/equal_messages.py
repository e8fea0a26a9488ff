"""Compares messages of a chat, which clients may send back in another form.

Ids of calls, the order and spacing of arguments, and null fields do not count. This module does not import torch.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.example import Message


def are_equal_messages(first: Message, second: Message) -> bool:
    """Whether two messages have the same role, content, thoughts and calls."""
    return first is second or _message_key(first) == _message_key(second)


def _message_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns role, content, thoughts and calls; ids of calls do not count."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return (
        message["role"],
        message.get("content") or "",
        message.get("reasoning_content") or "",
        [(call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls],
    )


def restore_call_ids(messages: Sequence[Message], prefix: Sequence[Message]) -> list[Message]:
    """Returns the messages after an equal prefix, with the call ids of this prefix.

    A client may have changed the ids of calls in `messages`; chat templates write them.
    """
    ids: dict[Any, Any] = {}
    for message, own in zip(messages, prefix, strict=False):
        for call, own_call in zip(message.get("tool_calls") or (), own.get("tool_calls") or (), strict=False):
            ids[call.get("id")] = own_call.get("id")
    return [
        message | {"tool_call_id": ids[message["tool_call_id"]]} if message.get("tool_call_id") in ids else message
        for message in messages[len(prefix) :]
    ]
