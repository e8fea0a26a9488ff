"""Renders chats as prompt text, with or without the tokenizer's chat template.

`model.chat_template=none` removes the template, and a base model has none. Without a template the prompt is the text of
its messages.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.example import SYSTEM_ROLES, Example, Message


def render_prompt(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """Renders the prompt of an example as text.

    Raises:
        ConfigError: the template refuses the roles or fields of the messages.
    """
    place = f"{example.source} row {example.row}".strip()
    roles = [message["role"] for message in example.messages]
    dialog_roles, roles_text = [role for role in roles if role not in SYSTEM_ROLES], ", ".join(roles)
    if not tokenizer.chat_template and dialog_roles != ["user"]:
        raise ConfigError(
            f"{place}: the messages ({roles_text}) are a conversation, but without a chat template a prompt "
            "must be one user message; set model.chat_template=FILE"
        )
    try:
        return render_chat(tokenizer, example.messages, example.tools) + example.prefill
    except Exception as error:  # a template is a program and can raise any exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "correct or remove the row"
        if len(dialog_roles) < len(roles):
            remedy = "set env.system_prompt='' to drop system messages"
        elif any(first == second for first, second in pairwise(roles)):
            remedy = "join consecutive messages of the same role"
        raise ConfigError(
            f"{place}: the chat template refuses the messages ({roles_text}): {reason}; {remedy}, or set "
            "model.chat_template=FILE to another template"
        ) from error


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
) -> str:
    """Renders a chat up to the model's answer; without a template joins its texts.

    Raises:
        Exception: any exception of the template.
    """
    if not tokenizer.chat_template:
        return "\n\n".join(message["content"] for message in messages)
    options: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except TypeError:  # some templates expect the arguments of a call as JSON text, not as an object
        with_json = [_with_json_arguments(message) for message in messages]
        return str(tokenizer.apply_chat_template(with_json, **options))


def _with_json_arguments(message: Message) -> Message:
    """Returns a message with the arguments of its tool calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            function = function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
            call = call | {"function": function} if "function" in call else function
        calls.append(call)
    return message | {"tool_calls": calls} if calls else message
