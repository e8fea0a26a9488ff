"""Reads and checks a row's messages and tool schemas, in the form of chat templates."""

import json
import re
from collections.abc import Mapping
from typing import Any

from config.schema.errors import ConfigError
from envs.data import Row
from envs.example import SYSTEM_ROLES, Message
from envs.row_files import format_value, is_json_object, read_json

ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
ANSWERABLE_ROLES = ("user", "tool")
"""Roles of a last message to which the model replies."""
_REMEDY = "correct or remove the row"
_PYTHON_NOTATION = re.compile(r"\s*\[?\s*\{\s*'role'\s*:")


def parse_conversation(value: Any, place: str) -> Any:
    """Parses messages from a text with JSON; returns any other value unchanged.

    Raises:
        ConfigError: the text has messages in Python's notation, or JSON with values that a row cannot have.
    """
    if not isinstance(value, str):
        return value
    if _PYTHON_NOTATION.match(value):
        raise ConfigError(
            f"{place}: the messages are in Python's notation, {format_value(value)}; write JSON (json.dumps)"
        )
    try:
        parsed_value = json.loads(value) if value.lstrip().startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return value
    entries = [parsed_value] if isinstance(parsed_value, dict) else parsed_value
    if not entries or not all(isinstance(entry, dict) and entry.get("role") in ROLES for entry in entries):
        return value
    return read_json(value, place)


def read_messages(row: Row, value: Any, column: str) -> list[Message]:
    """Reads the messages of a column: `role`, `content`, and fields such as `tool_calls`.

    Raises:
        ConfigError: the value is not a conversation, or its last message is of the assistant or the system.
    """
    place, entries = row.place, [value] if isinstance(value, dict) else value
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f'{place}: "{column}" must be {{"role": ..., "content": ...}} or a list of such objects, but is '
            f"{format_value(value)}"
        )
    messages = [_read_message(row, entry, column) for entry in entries]
    unknown = [message["role"] for message in messages if message["role"] not in ROLES]
    if unknown:
        raise ConfigError(
            f'{place}: "{column}" has the role {format_value(unknown[0])}; choose one of {", ".join(ROLES)}'
        )
    last = messages[-1]["role"]
    if last not in ANSWERABLE_ROLES:
        raise ConfigError(
            f'{place}: the last message of "{column}" has the role {last}, but must be a message that the '
            'model answers; end with a user message, and put the reference answer into the column "answer", '
            'or the beginning of the response into "prefill"'
        )
    if not messages[-1]["content"].strip():
        raise ConfigError(f'{place}: the last message of "{column}" is empty; write a question, or remove the row')
    return messages


def _read_message(row: Row, entry: Any, column: str) -> Message:
    """Reads one message of a column. Raises ConfigError for other values."""
    place = row.place
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise ConfigError(
            f'{place}: "{column}" must be {{"role": ..., "content": ...}} or a list of such objects, but has '
            f"{format_value(entry)}"
        )
    message = {name: value for name, value in entry.items() if value is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    message["content"] = _content_text(content, place, column)
    if "tool_calls" in message:
        message["tool_calls"] = _read_calls(row, message["tool_calls"])
    return message


def _content_text(content: Any, place: str, column: str) -> str:
    """Returns the text of a message's content; joins a list of texts."""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        other = sorted({str(part.get("type")) for part in content} - {"text"})
        if other:
            raise ConfigError(
                f'{place}: "{column}" holds content of the type {other[0]!r}, which is not supported; {_REMEDY}'
            )
        texts = [part.get("text") for part in content]
        content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else content
    if not isinstance(content, str):
        raise ConfigError(
            f'{place}: "{column}" must be messages whose content is text, but is {format_value(content)}; {_REMEDY}'
        )
    return content


def _read_calls(row: Row, calls: Any) -> list[dict[str, Any]]:
    """Reads the tool calls of a message, with arguments as objects, as templates expect."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(
            f'{row.place}: "tool_calls" must be a list of objects, but is {format_value(calls)}; {_REMEDY}'
        )
    found = []
    for call in _drop_added_nulls(row, calls):
        function = call.get("function", call)
        if isinstance(function, dict) and is_json_object(function.get("arguments")):
            arguments = read_json(function["arguments"], f"{row.place}: the arguments of a call")
            function = function | {"arguments": arguments}
            call = call | {"function": function} if "function" in call else function
        found.append(call)
    return found


def read_tools(row: Row) -> tuple[dict[str, Any], ...]:
    """Reads the tool schemas of the column `tools`, a list of objects.

    The column may also hold the list as JSON.

    Raises:
        ConfigError: the column has another value.
    """
    if not row.has_value("tools"):
        return ()
    value = row["tools"]
    if isinstance(value, str):
        value = read_json(value, f"{row.place}: column 'tools'") if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ConfigError(
            f"{row.place}: column 'tools' must be a list of schemas, but is {format_value(value)}; {_REMEDY}"
        )
    return tuple(_drop_added_nulls(row, value))


def _drop_added_nulls(row: Row, entries: list[Any]) -> list[Any]:
    """Returns objects without the nulls that a table adds to missing fields."""
    return [_without_nulls(each) for each in entries] if row.is_columnar else entries


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    return [_without_nulls(inside) for inside in value] if isinstance(value, list) else value
