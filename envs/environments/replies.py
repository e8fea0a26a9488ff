"""Converts results of environments to `Observation` and `Step`.

A reply is None, a text, a message, a list of messages, or a `Step`; or a tuple of a reply with a reward, and with
whether the episode is done. A text is a user message, or the result of the tool call that the turn has.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.environments.interface import EpisodeError, Observation, Step
from envs.example import SYSTEM_ROLES, Message
from envs.reward_workers.scoring import RESERVED_COMPONENTS, finite_float
from envs.row_files import format_value

REPLY_ROLES = ("user", "tool", *SYSTEM_ROLES)
ALL_ROLES = (*REPLY_ROLES, "assistant")
REPLY_FIELDS = ("role", "content", "name", "tool_call_id")
TURN_NOTES = ("malformed", "truncated")
"""Fields of a turn that are no part of its message."""
MAX_REPLY_CHARACTERS = 1_000_000
ANSWERED_CALL = "error: only the first call of a turn is answered"
"""Result of further calls of a turn, where the environment returned one text."""
ACCEPTED_REPLIES = (
    "return None, a text, a message, a list of messages, a Step, or (reply, reward) or (reply, reward, done)"
)


def read_observation(value: Any, place: str) -> Observation:
    """Converts the result of a reset.

    place: class and method, for messages.

    Raises:
        EpisodeError: the value is neither None, a text, a message, a list of messages nor an `Observation`.
    """
    if isinstance(value, Observation):
        messages = _read_messages(value.messages, place, ALL_ROLES)
        return Observation(messages, _read_schemas(value.tools, place))
    entries = value if isinstance(value, list | tuple) else [] if value is None or isinstance(value, str) else [value]
    if not all(isinstance(entry, Mapping) and "content" in entry for entry in entries):
        raise EpisodeError(
            f"{place}: the result is {format_value(value)}; return None, a text, a message or a list of messages"
        )
    messages = () if value is None else _read_messages(value, place, ALL_ROLES)
    if messages and messages[-1]["role"] == "assistant":
        raise EpisodeError(f"{place}: the last message is the assistant's, {format_value(messages[-1])}")
    return Observation(messages)


def read_step(value: Any, turn: Message, place: str) -> Step:
    """Converts the reply to a turn.

    turn: the model's message, whose tool calls a text answers.

    Raises:
        EpisodeError: the value is no reply.
    """
    reward, done = None, False
    if isinstance(value, tuple):
        if len(value) not in (2, 3) or isinstance(value[0], tuple | Step):
            raise EpisodeError(f"{place}: the reply is {format_value(value)}; {ACCEPTED_REPLIES}")
        value, reward, done = value if len(value) == 3 else (*value, False)
        if done is None or isinstance(done, str | Mapping | Sequence):
            raise EpisodeError(f"{place}: done is {format_value(done)}; return True or False")
    step = value if isinstance(value, Step) else Step(() if value is None else value, reward, done=bool(done))
    messages = _answer_calls(step.messages, turn) if isinstance(step.messages, str) else step.messages
    return Step(
        _read_messages(messages, place, REPLY_ROLES),
        None if step.reward is None else _read_number(step.reward, "the reward", place),
        _read_components(step.components, place),
        bool(step.done),
        None if step.history is None else _read_messages(step.history, place, ALL_ROLES),
    )


def first_messages(messages: Sequence[Message], observation: Observation) -> tuple[Message, ...]:
    """Joins the messages of a reset to those of the example.

    A user message after a user message continues it after an empty line, because many chat templates refuse two.
    """
    joined = list(messages)
    for message in observation.messages:
        if joined and joined[-1]["role"] == message["role"] == "user":
            joined[-1] = joined[-1] | {"content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return tuple(joined)


def _answer_calls(text: str, turn: Message) -> list[Message]:
    """Makes a tool result for each call of the turn, or a user message."""
    calls = turn.get("tool_calls") or []
    texts = [text, *[ANSWERED_CALL] * (len(calls) - 1)]
    if not calls:
        return [{"role": "user", "content": text}]
    return [tool_message(call, result) for call, result in zip(calls, texts, strict=True)]


def tool_message(call: Mapping[str, Any], text: str) -> Message:
    """Makes the message with the result of a call."""
    message = {"role": "tool", "name": call["function"]["name"], "content": text}
    return message | ({"tool_call_id": call["id"]} if call.get("id") is not None else {})


def _read_messages(value: Any, place: str, roles: Sequence[str]) -> tuple[Message, ...]:
    """Converts a text, a message or a sequence of messages."""
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list | tuple):
        raise EpisodeError(f"{place}: the reply is {format_value(value)}; {ACCEPTED_REPLIES}")
    messages = tuple(_read_message(entry, place, roles) for entry in entries)
    characters = sum(len(message["content"]) for message in messages)
    if characters > MAX_REPLY_CHARACTERS:
        raise EpisodeError(
            f"{place}: the reply has {characters:,} characters; at most {MAX_REPLY_CHARACTERS:,} are read"
        )
    return messages


def _read_message(value: Any, place: str, roles: Sequence[str]) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise EpisodeError(
            f'{place}: the message is {format_value(value)}; return {{"role": "user", "content": TEXT}}, or the text'
        )
    role = value.get("role")
    if role not in roles:
        raise EpisodeError(f"{place}: the message has the role {role!r}; choose one of {', '.join(roles)}")
    for name in ("name", "tool_call_id"):
        if not isinstance(value.get(name), str | None):
            raise EpisodeError(f"{place}: {name} of the message is {format_value(value[name])}; give a text")
    unknown = [name for name in value if name not in REPLY_FIELDS]
    if unknown and role != "assistant":
        raise EpisodeError(
            f"{place}: the message has the field {unknown[0]!r}; a message of the role {role} has "
            f"{', '.join(REPLY_FIELDS)}"
        )
    message = {name: field for name, field in value.items() if field is not None and name not in TURN_NOTES}
    # A lone surrogate has no encoding.
    return message | {"content": value["content"].encode("utf-8", "replace").decode()}


def _read_schemas(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    """Checks the schemas of tools, and returns them as plain JSON."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, Mapping) and "function" in each for each in value
    ):
        raise EpisodeError(
            f'{place}: the tools are {format_value(value)}; return schemas, each {{"type": "function", "function": '
            "{...}}"
        )
    try:
        schemas: list[dict[str, Any]] = json.loads(json.dumps(list(value)))
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"{place}: a schema of the tools is no JSON: {error}") from error
    return tuple(schemas)


def _read_components(value: Any, place: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise EpisodeError(f"{place}: the components are {format_value(value)}; return {{NAME: number}}")
    for name in value:
        if not isinstance(name, str) or not name or name in RESERVED_COMPONENTS:
            raise EpisodeError(f"{place}: a component is called {name!r}; give it a text that is no metric's name")
    return {name: _read_number(each, f"the component {name}", place) for name, each in value.items()}


def _read_number(value: Any, label: str, place: str) -> float:
    try:
        return finite_float(value, label)
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"{place}: {error}") from error
