"""Replies of the environment between turns: tool results, and a request to think again.

A conversation is one stream of token ids that is only ever extended: the prompt, what the model drew, what the
chat template puts around the environment's message, what the model drew next, and so on. Nothing is decoded
and encoded again, so what is trained on is what was sampled. The message is a user message: every chat
template has those. The reward judges the last turn.
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
from envs.example import SYSTEM_ROLES, Example, Mixed
from envs.tool_calls import Tool, instructions, make_tools

_MARK = "the-turn-goes-here"


class ThinkAgain:
    """Follows every turn, whatever it says: nothing is given away about right and wrong."""

    slow = False

    def __init__(self, message: str) -> None:
        self.message = message

    def reply(self, text: str) -> str | None:
        return self.message

    def close(self) -> None:
        pass


Replier = Tool | ThinkAgain


def make_repliers(env: EnvConfig) -> list[Replier]:
    """Make the tools of `env.tools`, in their order, then the request to think again.

    The first that replies is heard.
    """
    repliers: list[Replier] = [*make_tools(env)]
    return [*repliers, ThinkAgain(env.reasoning_prompt)] if env.reasoning else repliers


def with_instructions(examples: Sequence[Example], env: EnvConfig) -> Sequence[Example]:
    """Add the tools' instructions to the system prompts of examples.

    Without tools the examples are returned as they are. A mixture stays one, with the weights of its members.
    """
    if not env.tools:
        return examples
    said = instructions(env)
    told = []
    for example in examples:
        head, *rest = example.messages
        messages = ({"role": "system", "content": said}, head, *rest)
        if head["role"] in SYSTEM_ROLES:
            messages = ({**head, "content": f"{head['content']}\n\n{said}"}, *rest)
        told.append(replace(example, messages=messages))
    if not isinstance(examples, Mixed):
        return told
    return Mixed({name: told[slice(*bounds)] for name, bounds in examples.bounds.items()}, examples.weights)


class Conversation:
    """Answers turns in token ids, the slow ones in threads beside generation.

    Args:
        max_steps: turns of the model; the environment is silent after the last one.
        threads: slow replies at a time.

    Raises:
        ConfigError: the chat template cannot render a second user message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        repliers: Sequence[Replier],
        max_steps: int,
        threads: int = 4,
    ) -> None:
        self.tokenizer = tokenizer
        self.control = control_tokens(tokenizer)
        self.repliers = repliers
        self.max_steps = max_steps
        slow = any(replier.slow for replier in repliers)
        self._threads = ThreadPoolExecutor(threads, "replies") if slow else None
        self._after("ok")

    async def reply(self, token_ids: Sequence[int], turn: int) -> list[int]:
        """Token ids to append to the model's turn number `turn`, from 1.

        The turn ended in an end token. The ids are the rest of the template's end of the turn, the message, and the
        beginning of the model's next turn.

        No ids: the conversation is over. What a replier raises is raised here.
        """
        if turn >= self.max_steps:
            return []
        if self._threads is None:
            return self.reply_now(token_ids)
        return await get_running_loop().run_in_executor(self._threads, self.reply_now, token_ids)

    def reply_now(self, token_ids: Sequence[int]) -> list[int]:
        """Reply to any turn, as `reply` does.

        Nothing follows a turn with control tokens before its end, or with ids of no token: it is `invalid`.
        """
        if self.control.inside(token_ids, token_ids[-1:]):
            return []
        (text,) = self.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)
        said = next((said for by in self.repliers if (said := by.reply(text)) is not None), None)
        if said is None:
            return []
        ids = self._after(said.encode("utf-8", "replace").decode())  # a lone surrogate has no encoding
        return ids[1:] if ids[:1] == list(token_ids[-1:]) else ids

    def _after(self, message: str) -> list[int]:
        """The chat from the end of an assistant message on, through a user message, to the next assistant's."""
        chat = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": message},
        ]
        try:
            text = render_chat(self.tokenizer, chat) if self.tokenizer.chat_template else ""
        except Exception:  # a template is a program, and raises what it likes
            text = ""
        _, found, rest = text.partition(_MARK)
        if not found or message.strip() not in rest:
            raise ConfigError(
                f"model.name={self.tokenizer.name_or_path}: its chat template does not render a user message after an "
                "assistant's, so env.max_steps > 1 cannot work with it; take another template "
                "(model.chat_template=FILE), or env.max_steps=1"
            )
        if self.control.spelled_in(chat):
            return self.control.encode(self.control.render(chat).partition(_MARK)[2])
        ids: list[int] = self.tokenizer.encode(rest, add_special_tokens=False)
        return ids

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for replier in self.repliers:
            replier.close()
