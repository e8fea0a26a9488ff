"""Renders chats as prompt text, with the tokenizer's chat template or without one.

`model.chat_template=none` takes the template away, and a base model has none: a prompt then is the text of its messages
and nothing else.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.example import SYSTEM_ROLES, Example, Message


def render_prompt(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """The prompt as text, ending where the model goes on.

    Raises:
        ConfigError: the template refuses the roles of the messages, or what they hold.
    """
    place = f"{example.source} row {example.row}".strip()
    roles = [message["role"] for message in example.messages]
    spoken, listed = [role for role in roles if role not in SYSTEM_ROLES], ", ".join(roles)
    if not tokenizer.chat_template and spoken != ["user"]:
        raise ConfigError(
            f"{place}: its messages ({listed}) are a conversation, and without a chat template a prompt is one message "
            "of the user; give a template, model.chat_template=FILE"
        )
    try:
        return render_chat(tokenizer, example.messages, example.tools) + example.prefill
    except Exception as error:  # a template is a program, and raises what it likes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "mend or remove the row"
        if len(spoken) < len(roles):
            remedy = "env.system_prompt='' leaves system messages out"
        elif any(first == second for first, second in pairwise(roles)):
            remedy = "join messages of one role that follow each other"
        raise ConfigError(
            f"{place}: the chat template refuses its messages ({listed}): {reason}; {remedy}, or give another "
            "template: model.chat_template=FILE"
        ) from error


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
) -> str:
    """Render a chat up to the model's answer; without a template join its texts.

    Raises:
        Exception: whatever the template raises.
    """
    if not tokenizer.chat_template:
        return "\n\n".join(message["content"] for message in messages)
    options: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except TypeError:  # some templates join the arguments of a call to a text, most write an object as JSON
        written = [_with_json_arguments(message) for message in messages]
        return str(tokenizer.apply_chat_template(written, **options))


def _with_json_arguments(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            written = function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
            call = call | {"function": written} if "function" in call else written
        calls.append(call)
    return message | {"tool_calls": calls} if calls else message


def texts_in(value: Any) -> Iterator[str]:
    """Every text inside a value of JSON, the keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from texts_in(key)
            yield from texts_in(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from texts_in(inside)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Copy a value of JSON with every text changed, keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_texts(inside, change) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(inside, change) for inside in value]
    return value
