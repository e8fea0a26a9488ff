"""Checks of prompts by the model's tokenizer: refusing templates, control tokens in texts."""

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from envs.chat_template import render_prompt
from envs.control_tokens import control_tokens
from envs.example import Example

log = logging.getLogger(__name__)


def check_prompts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], name: str) -> None:
    """Render prompts as a run will, and warn of those that spell control tokens.

    Of plain chats one of each sequence of roles is rendered; calls and tools are, all of them.

    name: the data set, for messages.

    Raises:
        ConfigError: the chat template refuses the messages of a row.
    """
    plain: dict[tuple[str, ...], Example] = {}
    for example in examples:
        if example.tools or any(len(message) > 2 for message in example.messages):
            render_prompt(tokenizer, example)
        else:
            plain.setdefault(tuple(message["role"] for message in example.messages), example)
    for example in plain.values():
        render_prompt(tokenizer, example)
    if not tokenizer.chat_template:
        return
    control = control_tokens(tokenizer)
    spelled = [
        (example, token)
        for example in examples
        if (token := control.first_spelled([example.messages, example.tools, example.prefill])) is not None
    ]
    if spelled:
        example, token = spelled[0]
        counts = f"{name}: {len(spelled)} of {len(examples)}"
        log.warning(
            "%s prompts spell control tokens of this model (row %d: %r), which are encoded as text; if these are chats "
            "that are rendered already, model.chat_template=none takes them as they are",
            counts,
            example.row,
            token,
        )
