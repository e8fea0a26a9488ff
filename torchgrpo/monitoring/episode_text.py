"""Tool calls of turns with their results, and episodes as text for people.

turn 1: 14 tokens, engine 0.31 s, environment 0.02 s
  I multiply.
  mul(a=12, b=7) -> 84

Rewards of turns are shown where a turn has one.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envs.example import Message
from envs.group import SequenceStart, Turn


@dataclass(frozen=True)
class ToolCall:
    """One tool call of a turn, and its result.

    arguments: by name; a text or another JSON value if the call has no object. result: text that the model reads; empty
    without an answer. outcome: as `Turn.tool_outcomes`; empty if unknown.
    """

    name: str
    arguments: Any
    result: str = ""
    outcome: str = ""

    @property
    def text(self) -> str:
        """Call in one line, as `name(argument=value)`."""
        if not isinstance(self.arguments, dict):
            return f"{self.name}({_compact_json(self.arguments)})"
        return f"{self.name}({', '.join(f'{key}={_compact_json(value)}' for key, value in self.arguments.items())})"

    @property
    def line(self) -> str:
        """Call, its result and a failed outcome in one line."""
        result = f" -> {' '.join(self.result.split())}" if self.result else ""
        return f"{self.text}{result}{'' if self.outcome in ('', 'ok') else f' ({self.outcome})'}"


def _compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def escape_surrogates(text: str) -> str:
    """Replaces lone surrogates, which JSON arguments may hold and UTF-8 cannot, by their codes."""
    return text.encode(errors="backslashreplace").decode()


def split_tool_calls(turn: Turn) -> tuple[list[ToolCall], list[Message]]:
    """Returns the calls of a turn with their results, and the other replies.

    A result belongs to the call with its `tool_call_id`; without such a call, to the next call without a result.
    """
    calls = turn.message.get("tool_calls") or ()
    results: list[Message | None] = [None] * len(calls)
    others: list[Message] = []
    numbers = {call["id"]: number for number, call in enumerate(calls) if "id" in call}
    for reply in turn.replies:
        number = numbers.get(reply.get("tool_call_id"))
        if number is None or results[number] is not None:
            number = results.index(None) if None in results and "tool_call_id" not in reply else None
        if reply["role"] == "tool" and number is not None:
            results[number] = reply
        else:
            others.append(reply)
    outcomes = [*turn.tool_outcomes[: len(calls)], *[""] * (len(calls) - len(turn.tool_outcomes))]
    return [
        ToolCall(call["function"]["name"], call["function"]["arguments"], result["content"] if result else "", outcome)
        for call, result, outcome in zip(calls, results, outcomes, strict=True)
    ], others


def turns_with_new_sequence(turns: Sequence[Turn], starts: Sequence[SequenceStart]) -> set[int]:
    """Returns the indices of the turns that begin a further sequence."""
    begins = [one.start for one in starts]
    sequences = [bisect_right(begins, turn.start) for turn in turns]
    return {number for number, sequence in enumerate(sequences) if number and sequence not in sequences[:number]}


def format_turns(
    turns: Sequence[Turn], starts: Sequence[SequenceStart], indent: Callable[[str, int], list[str]]
) -> Iterator[str]:
    """Yields the lines of an episode.

    A turn has a headline, then its texts, calls and replies.

    starts: starts of the sequences. indent: returns the lines of a text, indented by a number of columns.
    """
    for text, width in _turn_texts(turns, starts):
        yield from indent(escape_surrogates(text), width)


def _turn_texts(turns: Sequence[Turn], starts: Sequence[SequenceStart]) -> Iterator[tuple[str, int]]:
    """Yields the texts of an episode with the width of their indent."""
    new_sequences = turns_with_new_sequence(turns, starts)
    has_rewards = any(turn.reward for turn in turns)
    for number, turn in enumerate(turns):
        if number in new_sequences:
            yield "new sequence: earlier messages were rewritten", 0
        for message in turn.opening:
            yield f"{message['role']}: {message['content']}", 2
        calls, replies = split_tool_calls(turn)
        reward = f"reward {turn.reward:.3g}, " if has_rewards else ""
        words = [f"turn {number + 1}: {reward}{turn.end - turn.start} tokens"]
        words += [f"start {turn.start_seconds:.2f} s"] if turn.start_seconds >= 0.005 else []
        words += [f"engine {turn.engine_seconds:.2f} s", f"environment {turn.env_seconds:.2f} s"]
        malformed = turn.tool_outcomes[len(calls) :].count("malformed")
        words += [f"{malformed} malformed call{'s' * (malformed > 1)}"] if malformed else []
        yield ", ".join(words), 0
        reasoning, content = turn.message.get("reasoning_content"), turn.message.get("content")
        if reasoning:
            yield f"reasoning: {reasoning}", 2
        if content or not calls:
            yield content or "(empty)", 2
        for call in calls:
            yield call.line, 2
        for reply in replies:
            yield f"{reply['role']}: {reply['content']}", 2
