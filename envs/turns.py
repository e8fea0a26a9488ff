"""Replies of the environment between turns: tool results and reflection prompts.

A conversation is one stream of token ids that only grows: the prompt, the first sampled turn, the environment's message
with the tokens that the chat template puts around it, the next sampled turn, and so on. Sampled tokens are not decoded
and encoded again, so training sees exactly the sampled tokens. The environment's message is a user message, since every
chat template has user messages. The reward scores the last turn.
"""

from asyncio import get_running_loop
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.chat_template import render_chat
from envs.control_tokens import control_tokens
from envs.example import SYSTEM_ROLES, Example, MixedExamples
from envs.tool_calls import Tool, make_tools, tool_instructions

_MARK = "the-turn-goes-here"


class ReflectionPrompt:
    """Fixed reply to every turn, without a hint on whether the answer is correct."""

    is_slow = False

    def __init__(self, message: str) -> None:
        self.message = message

    def reply(self, text: str) -> str | None:
        """Returns the message."""
        return self.message

    def close(self) -> None:
        """Does nothing."""


EnvResponder = Tool | ReflectionPrompt


def make_responders(env: EnvConfig) -> list[EnvResponder]:
    """Makes the tools of `env.tools` in their order, then the reflection prompt.

    The first responder with a reply answers a turn.
    """
    responders: list[EnvResponder] = [*make_tools(env)]
    return [*responders, ReflectionPrompt(env.reasoning_prompt)] if env.reasoning else responders


def with_tool_instructions(examples: Sequence[Example], env: EnvConfig) -> Sequence[Example]:
    """Returns examples with the tools' instructions in their system prompts.

    Without tools the examples are returned unchanged. A mixture stays a mixture with the same weights.
    """
    if not env.tools:
        return examples
    instructions = tool_instructions(env)
    new_examples = []
    for example in examples:
        head, *rest = example.messages
        messages = ({"role": "system", "content": instructions}, head, *rest)
        if head["role"] in SYSTEM_ROLES:
            messages = ({**head, "content": f"{head['content']}\n\n{instructions}"}, *rest)
        new_examples.append(replace(example, messages=messages))
    if not isinstance(examples, MixedExamples):
        return new_examples
    return MixedExamples(
        {name: new_examples[slice(*bounds)] for name, bounds in examples.bounds.items()}, examples.weights
    )


class Conversation:
    """Environment that replies to turns in token ids, with slow replies in threads.

    Args:
        max_steps: largest number of turns; the environment does not reply to the last turn.
        threads: largest number of slow replies in parallel.

    Raises:
        ConfigError: the chat template cannot render a second user message.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, responders: Sequence[EnvResponder], max_steps: int, threads: int = 4
    ) -> None:
        self.tokenizer = tokenizer
        self.control = control_tokens(tokenizer)
        self.responders = responders
        self.max_steps = max_steps
        has_slow_replies = any(responder.is_slow for responder in responders)
        self._threads = ThreadPoolExecutor(threads, "replies") if has_slow_replies else None
        self._reply_token_ids("ok")  # checks the chat template

    async def reply(self, token_ids: Sequence[int], turn: int) -> list[int]:
        """Returns the token ids to append to the model's turn number `turn`, counted from 1.

        The turn must end in an end token. The ids are the rest of the template's end of the turn, the message, and the
        beginning of the model's next turn. An empty list ends the conversation. Exceptions of a responder propagate.
        """
        if turn >= self.max_steps:
            return []
        if self._threads is None:
            return self.reply_sync(token_ids)
        return await get_running_loop().run_in_executor(self._threads, self.reply_sync, token_ids)

    def reply_sync(self, token_ids: Sequence[int]) -> list[int]:
        """Replies as `reply` in the calling thread, whatever the turn's number.

        A turn with control tokens before its end, or with ids without a token, is `invalid` and gets no reply.
        """
        if self.control.has_control_tokens(token_ids, token_ids[-1:]):
            return []
        (text,) = self.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)
        message = next(
            (message for responder in self.responders if (message := responder.reply(text)) is not None), None
        )
        if message is None:
            return []
        # a lone surrogate has no encoding
        ids = self._reply_token_ids(message.encode("utf-8", "replace").decode())
        return ids[1:] if ids[:1] == list(token_ids[-1:]) else ids

    def _reply_token_ids(self, message: str) -> list[int]:
        """Encodes the chat between the end of an assistant message and the next assistant message.

        `message` is the user message between them. Raises ConfigError if the chat template cannot render the chat.
        """
        chat = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": message},
        ]
        try:
            text = render_chat(self.tokenizer, chat) if self.tokenizer.chat_template else ""
        except Exception:  # a template is a program and can raise any exception
            text = ""
        _, mark, rest = text.partition(_MARK)
        if not mark or message.strip() not in rest:
            raise ConfigError(
                f"model.name={self.tokenizer.name_or_path}: its chat template does not render a user message "
                "after an assistant's, so env.max_steps must be 1 with this template; set another template "
                "(model.chat_template=FILE), or env.max_steps=1"
            )
        if self.control.spells_control_token(chat):
            return self.control.encode_rendered(self.control.render_with_private_names(chat).partition(_MARK)[2])
        ids: list[int] = self.tokenizer.encode(rest, add_special_tokens=False)
        return ids

    def close(self) -> None:
        """Ends the threads and closes all responders."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for responder in self.responders:
            responder.close()
