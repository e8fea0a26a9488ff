"""Reads a row's conversation and its tools, as chat templates take them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from config.schema.errors import ConfigError
from envs.data import Row
from envs.example import SYSTEM_ROLES, Message
from envs.row_files import is_json_object, read_json, shown

ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
ASKING = ("user", "tool")
"""Roles of a message that the model replies to."""
_REMEDY = "mend or remove the row"
_OF_PYTHON = re.compile(r"\s*\[?\s*\{\s*'role'\s*:")


def conversation_in(value: Any, place: str) -> Any:
    """The messages that a text is the JSON of; any other value as it is.

    Raises:
        ConfigError: a text is Python's notation of messages, or JSON of some that a row cannot hold.
    """
    if not isinstance(value, str):
        return value
    if _OF_PYTHON.match(value):
        raise ConfigError(f"{place}: messages in Python's notation, {shown(value)}; write JSON (json.dumps)")
    try:
        read = json.loads(value) if value.lstrip().startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return value
    listed = [read] if isinstance(read, dict) else read
    if not listed or not all(isinstance(entry, dict) and entry.get("role") in ROLES for entry in listed):
        return value
    return read_json(value, place)


def read_messages(row: Row, given: Any, column: str) -> list[Message]:
    """Messages of a column: `role`, `content`, and fields such as `tool_calls`.

    Raises:
        ConfigError: what is no conversation that ends with a message to reply to.
    """
    place, listed = row.place, [given] if isinstance(given, dict) else given
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            f'{place}: "{column}" must be {{"role": ..., "content": ...}} or a list of them, it is {shown(given)}'
        )
    messages = [_read_message(row, entry, column) for entry in listed]
    unknown = [message["role"] for message in messages if message["role"] not in ROLES]
    if unknown:
        raise ConfigError(f'{place}: "{column}" has the role {shown(unknown[0])}; known: {", ".join(ROLES)}')
    last = messages[-1]["role"]
    if last not in ASKING:
        raise ConfigError(
            f'{place}: the last of "{column}" is of the {last}, but the model is to answer it; end with one of '
            'the user, and put the answer that is wanted into the column "answer", or its beginning into "prefill"'
        )
    if not messages[-1]["content"].strip():
        raise ConfigError(f'{place}: the last of "{column}" is empty; give a question, or remove the row')
    return messages


def _read_message(row: Row, entry: Any, column: str) -> Message:
    place = row.place
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise ConfigError(
            f'{place}: "{column}" must be {{"role": ..., "content": ...}} or a list of them, it has {shown(entry)}'
        )
    message = {name: value for name, value in entry.items() if value is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    message["content"] = _text_of(content, place, column)
    if "tool_calls" in message:
        message["tool_calls"] = _read_calls(row, message["tool_calls"])
    return message


def _text_of(content: Any, place: str, column: str) -> str:
    """The text of a message's content; a list of texts is joined."""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        other = sorted({str(part.get("type")) for part in content} - {"text"})
        if other:
            raise ConfigError(
                f'{place}: "{column}" holds a part of the type {other[0]!r}, which no model here reads; {_REMEDY}'
            )
        texts = [part.get("text") for part in content]
        content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else content
    if not isinstance(content, str):
        raise ConfigError(
            f'{place}: "{column}" must be messages whose content is text, it is {shown(content)}; {_REMEDY}'
        )
    return content


def _read_calls(row: Row, calls: Any) -> list[dict[str, Any]]:
    """Calls of tools, their arguments as objects, as templates write them."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(
            f'{row.place}: "tool_calls" must be a list of objects, it is {shown(calls)}; {_REMEDY}'
        )
    found = []
    for call in _own_fields(row, calls):
        function = call.get("function", call)
        if isinstance(function, dict) and is_json_object(function.get("arguments")):
            read = read_json(function["arguments"], f"{row.place}: the arguments of a call")
            function = function | {"arguments": read}
            call = call | {"function": function} if "function" in call else function
        found.append(call)
    return found


def read_tools(row: Row) -> tuple[dict[str, Any], ...]:
    """The schemas of the column `tools`: a list of objects, or JSON of one.

    Raises:
        ConfigError: it holds something else.
    """
    if not row.has("tools"):
        return ()
    given = row["tools"]
    if isinstance(given, str):
        given = read_json(given, f"{row.place}: column 'tools'") if given.strip() else []
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise ConfigError(
            f"{row.place}: column 'tools' must be a list of schemas, it is {shown(given)}; {_REMEDY}"
        )
    return tuple(_own_fields(row, given))


def _own_fields(row: Row, listed: list[Any]) -> list[Any]:
    """Objects without the nulls that a table adds to them."""
    return [_without_nulls(each) for each in listed] if row.columnar else listed


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    return [_without_nulls(inside) for inside in value] if isinstance(value, list) else value
