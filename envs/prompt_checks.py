"""Raises errors of the chat template, and warns of prompts that spell control tokens."""

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from envs.chat_template import render_prompt
from envs.control_tokens import control_tokens
from envs.example import Example

log = logging.getLogger(__name__)


def check_prompts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], name: str) -> None:
    """Renders prompts with the chat template, and warns of prompts that spell control tokens.

    One plain chat of each sequence of roles is rendered, and every example with tools or tool calls.

    name: name of the data set, for messages.

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
    spelling_examples = [
        (example, token)
        for example in examples
        if (token := control.first_spelled_token([example.messages, example.tools, example.prefill])) is not None
    ]
    if spelling_examples:
        example, token = spelling_examples[0]
        counts = f"{name}: {len(spelling_examples)} of {len(examples)}"
        log.warning(
            "%s prompts contain the text of control tokens of this model (row %d: %r), which is encoded as "
            "plain text; set model.chat_template=none if the prompts are already rendered chats",
            counts,
            example.row,
            token,
        )
