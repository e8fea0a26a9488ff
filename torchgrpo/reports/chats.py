"""Data of episodes that the report shows as chats."""

from typing import Any

from torchgrpo.monitoring.completion_record import parse_sequence_starts, parse_turns
from torchgrpo.monitoring.episode_text import escape_surrogates, split_tool_calls, turns_with_new_sequence
from torchgrpo.reports.completion_selection import MAX_TEXT_LENGTH
from torchgrpo.reports.curves import round_number

MIN_TEXT_LENGTH = 200
"""Minimum number of characters to which a text of a chat is truncated."""


def truncate_text(text: str, limit: int) -> str:
    """Truncates a text and appends the number of removed characters. Lone surrogates become codes."""
    text = escape_surrogates(text)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} characters more)"


def chat_data(completion: dict[str, Any]) -> dict[str, Any]:
    """Returns the turns of a recorded completion, and the error that ended it.

    Each of the T texts is truncated to a T-th of `MAX_TEXT_LENGTH`, or to `MIN_TEXT_LENGTH` if that is more. A call is
    a list of its text, its result and its failed outcome; a reply is a list of role and text.
    """
    turns, starts = parse_turns(completion), parse_sequence_starts(completion)
    num_texts = sum(
        2 + len(turn.message.get("tool_calls") or ()) + len(turn.replies) + len(turn.opening) for turn in turns
    )
    limit = max(MIN_TEXT_LENGTH, MAX_TEXT_LENGTH // max(1, num_texts))
    new_sequences = turns_with_new_sequence(turns, starts)
    data = []
    for number, turn in enumerate(turns):
        calls, replies = split_tool_calls(turn)
        data.append(
            {
                "text": truncate_text(turn.message.get("content") or "", limit),
                "reasoning": truncate_text(turn.message.get("reasoning_content") or "", limit),
                "calls": [
                    [
                        truncate_text(call.text, limit),
                        truncate_text(call.result, limit),
                        "" if call.outcome == "ok" else call.outcome,
                    ]
                    for call in calls
                ],
                "malformed": turn.tool_outcomes[len(calls) :].count("malformed"),
                "opening": [[message["role"], truncate_text(message["content"], limit)] for message in turn.opening],
                "replies": [[reply["role"], truncate_text(reply["content"], limit)] for reply in replies],
                "reward": round_number(turn.reward),
                "engine_s": round_number(turn.engine_seconds),
                "env_s": round_number(turn.env_seconds),
                "start_s": round_number(turn.start_seconds),
                "tokens": [turn.start, turn.end],
                "new_sequence": number in new_sequences,
            }
        )
    return {"turns": data, "sequences": max(1, len(starts)), "error": truncate_text(completion["error"], limit)}
