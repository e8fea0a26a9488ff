"""Renders chats as prompt text, with or without the tokenizer's chat template.

`model.chat_template=none` removes the template, and a base model has none. Without a template the prompt is the text of
its messages.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.example import SYSTEM_ROLES, Example, Message

_END_OF_THOUGHT = "</think>"
_PROBE_TOOL = "look_up_the_probe"


def render_prompt(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """Renders the prompt of an example as text.

    Raises:
        ConfigError: the template refuses the roles or fields of the messages.
    """
    place, messages = example_place(example), example.messages
    roles = [message["role"] for message in messages]
    if not tokenizer.chat_template and [role for role in roles if role not in SYSTEM_ROLES] != ["user"]:
        raise ConfigError(
            f"{place}: the messages ({', '.join(roles)}) are a conversation, but without a chat template a prompt "
            "must be one user message; set model.chat_template=FILE"
        )
    with convert_refusals(place, messages):
        return render_chat(tokenizer, messages, example.tools) + example.prefill


def example_place(example: Example) -> str:
    """Returns the data set and the row of an example, for messages."""
    return f"{example.source} row {example.row}".strip()


@contextmanager
def convert_refusals(place: str, messages: Sequence[Message]) -> Iterator[None]:
    """Turns exceptions of a chat template into a ConfigError with the place and a remedy."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a template is a program and can raise any exception
        roles = [message["role"] for message in messages]
        dialog_roles = [role for role in roles if role not in SYSTEM_ROLES]
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "correct or remove the row"
        if len(dialog_roles) < len(roles):
            remedy = "set env.system_prompt='' to drop system messages"
        elif any(first == second for first, second in pairwise(roles)):
            remedy = "join consecutive messages of the same role"
        raise ConfigError(
            f"{place}: the chat template refuses the messages ({', '.join(roles)}): {reason}; {remedy}, or set "
            "model.chat_template=FILE to another template"
        ) from error


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Renders a chat; without a template joins its texts.

    add_generation_prompt: whether the text ends with the beginning of the model's answer.

    Raises:
        Exception: any exception of the template.
    """
    if not tokenizer.chat_template:
        return "\n\n".join(message["content"] for message in messages)
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    options["tools"] = list(tools) or None
    try:
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except TypeError:  # some templates expect the arguments of a call as JSON text, not as an object
        with_json = [_with_json_arguments(message) for message in messages]
        return str(tokenizer.apply_chat_template(with_json, **options))


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text of the chat template.

    The text of all templates where the tokenizer has several; empty without one.
    """
    templates: str | dict[str, str] = tokenizer.chat_template or ""
    return templates if isinstance(templates, str) else "\n".join(templates.values())


def template_renders_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes the tools of a chat into the prompt."""
    if not tokenizer.chat_template:
        return False
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": _PROBE_TOOL, "description": "Does nothing.", "parameters": parameters}
    probe = {"type": "function", "function": function}
    try:
        return _PROBE_TOOL in render_chat(tokenizer, [{"role": "user", "content": "question"}], [probe])
    except Exception:  # a template is a program and can raise any exception
        return False


def separate_thoughts(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
) -> Sequence[Message]:
    """Moves thoughts from `content` to `reasoning_content` where the chat template does the same.

    Some templates search `content` of an assistant message for `</think>`. The moved thoughts are rendered to the same
    text. Messages that are rendered differently stay unchanged: then the thoughts are text of the answer.
    """
    if not any(map(_holds_thoughts, messages)):
        return messages
    with suppress(Exception):  # a template that refuses a token in a text may take the marked text
        text = render_chat(tokenizer, messages, tools)
        for separate in (_trimmed_thoughts, _exact_thoughts):
            separated = [separate(message) if _holds_thoughts(message) else message for message in messages]
            if render_chat(tokenizer, separated, tools) == text:
                return separated
    return messages


def _holds_thoughts(message: Message) -> bool:
    content = message.get("content")
    is_thinking = isinstance(content, str) and _END_OF_THOUGHT in content
    return is_thinking and message["role"] == "assistant" and "reasoning_content" not in message


def _exact_thoughts(message: Message) -> Message:
    first, *_, last = message["content"].split(_END_OF_THOUGHT)
    return message | {"reasoning_content": first.rpartition("<think>")[2], "content": last}


def _trimmed_thoughts(message: Message) -> Message:
    exact = _exact_thoughts(message)
    thoughts, content = exact["reasoning_content"].strip("\n"), exact["content"].lstrip("\n")
    return exact | {"reasoning_content": thoughts, "content": content}


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
