"""Encodes the text that a chat template writes between two answers of the model.

A conversation is one stream of token ids as long as the template only extends it: prompt, sampled answer, suffix, next
answer, and so on. Sampled tokens stay as they were sampled. If the template rewrites an earlier part of the chat, for
example because it drops the thoughts of earlier turns, the chat continues as another sequence.

                      prompt                  answer         suffix
    before  <user>1+1=<end><assistant>|     2|<end>
    after   <user>1+1=<end><assistant>|     2|<end>|<user>Sure?<end><assistant>
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.chat_template import convert_refusals, render_chat
from envs.control_tokens import control_tokens
from envs.example import Message

_MARK = "the-turn-goes-here"


def appended_suffix_ids(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[Message],
    after: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    end_token: int | None,
) -> list[int]:
    """Encodes the text between two answers, even if the template rewrites what precedes it.

    The arguments are those of `GrowingChat.suffix_ids`. If the template ends an answer with another token than
    `end_token`, the ids begin with the template's end.

    Raises:
        ConfigError: the template refuses the messages, or does not render the answer or a new message.
    """
    chat, new_messages = _Chat(tokenizer, after, tools), after[len(before) :]
    for answer in _marked_answers(before[-1]):
        marked = [*before[:-1], answer]
        whole, text = chat.render(marked, add_generation_prompt=False), chat.render([*marked, *new_messages])
        marks = whole.count(_MARK)
        if not marks or text.count(_MARK) < marks:
            continue
        answer_text, rest = whole.split(_MARK)[-1], text.split(_MARK, marks)[-1]
        suffix = chat.continuation(answer_text, rest, chat.token_text(end_token))
        if suffix is None:  # another end token: it stays in the stream, and the template's end follows
            suffix = chat.continuation(answer_text, rest, "")
        if suffix is not None and not _missing_messages(new_messages, suffix):
            return chat.encode_after(end_token, suffix)
    raise _cannot_render(tokenizer, new_messages)


def check_user_replies(tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that a user message can follow an answer.

    Raises:
        ConfigError: there is no chat template, or it does not render such a message.
    """
    question, answer, reply = ({"role": role, "content": f"the {role}"} for role in ("user", "assistant", "user"))
    if not tokenizer.chat_template:
        raise _cannot_render(tokenizer, [reply])
    appended_suffix_ids(tokenizer, [question, answer], [question, answer, reply], (), None)


class GrowingChat:
    """Chat of one episode, which keeps its last text.

    The text of the next turn begins with the last text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self._messages: list[Message] = []
        self._text: str | None = None

    def suffix_ids(
        self, before: Sequence[Message], after: Sequence[Message], end_token: int | None
    ) -> list[int] | None:
        """Encodes what the template writes after an answer, up to the next answer.

        The text of the answer, its thoughts and its calls must stay in the chat. White space between these parts, and
        the spacing of a call's arguments, may differ from the sampled text.

        Args:
            before: messages with the answer as the last one.
            after: the messages of `before`, then the new ones.
            end_token: end token that was sampled; None: the answer was cut off, so the ids begin with the template's
                end.

        Returns:
            Token ids, or None if the template rewrites the chat before the new messages.

        Raises:
            ConfigError: the template refuses the messages, or does not render a new message.
        """
        prompt = self._text if self._messages == list(before[:-1]) else None
        has_names = False
        if prompt is not None:  # the kept messages spell no token of the template
            has_names = control_tokens(self.tokenizer).spells_control_token(after[len(before) - 1 :])
        chat = _Chat(self.tokenizer, after, self.tools, None if prompt is None else has_names)
        if prompt is None or has_names:
            prompt = chat.render(before[:-1])
        text = chat.render(after)
        self._messages, self._text = list(after), None if chat.has_names else text
        return chat.suffix_ids(prompt, text, before, after, end_token)


class _Chat:
    """Renders a chat, with private names for the template's tokens if a message spells one.

    messages: the longest chat to render. has_names: whether a message spells such a token; None if unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        has_names: bool | None = None,
    ) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.control = control_tokens(tokenizer)
        self.has_names = self.control.spells_control_token(messages, tools) if has_names is None else has_names

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Renders messages; raises ConfigError if the template refuses them."""
        with convert_refusals("a turn of an episode", messages):
            if self.has_names:
                return self.control.render_with_private_names(messages, self.tools, add_generation_prompt)
            return render_chat(self.tokenizer, messages, self.tools, add_generation_prompt)

    def suffix_ids(
        self, prompt: str, text: str, before: Sequence[Message], after: Sequence[Message], end_token: int | None
    ) -> list[int] | None:
        """Encodes what follows the answer in `text`, which is the rendered `after`.

        prompt: the rendered messages before the answer.
        """
        if not text.startswith(prompt):
            return None
        end, answer, rest = self.token_text(end_token), before[-1], text[len(prompt) :]
        content, thoughts = answer.get("content") or "", answer.get("reasoning_content") or ""
        calls = answer.get("tool_calls") or ()
        if not calls and "reasoning_content" not in answer:  # the content is the sampled text
            suffix = rest[len(content + end) :] if rest.startswith(content + end) else None
        else:
            whole = self.render(before, add_generation_prompt=False)
            names = [call.get("function", call)["name"] for call in calls]
            answer_text = whole[len(prompt) :] if whole.startswith(prompt) else ""
            if not all(part in answer_text for part in (content, thoughts, *names)):
                return None
            last = "" if calls else content or thoughts
            suffix = self.continuation(answer_text, rest, end, last)
        if suffix is None:
            return None
        missing = _missing_messages(after[len(before) :], suffix)
        if missing:
            raise _cannot_render(self.tokenizer, missing)
        return self.encode_after(end_token, suffix)

    def token_text(self, token: int | None) -> str:
        """Returns the text of an end token in the rendered chat; empty for None."""
        if token is None:
            return ""
        text = self.control.texts.get(token) or str(self.tokenizer.decode([token]))
        return self.control.private_name(text) if self.has_names and token in self.control.texts else text

    def continuation(self, answer_text: str, rest: str, end: str, last: str = "") -> str | None:
        """Returns the part of `rest` behind an answer; None without the answer before it.

        Args:
            answer_text: the answer at the end of a chat, where control tokens and white space may be the template's.
            rest: the answer and everything after it in the longer chat.
            end: text of the sampled end token; empty: the answer was cut off.
            last: last text of an answer that was cut off, if known.
        """
        if not end:
            stop = answer_text.rfind(last) + len(last) if last else len(self._without_end(answer_text))
            return rest[stop:] if rest.startswith(answer_text[:stop]) else None
        # A template may write more at the end of a chat than between turns, or end an answer with the next role's mark.
        stays = [answer_text + end]
        head, found, tail = answer_text.rpartition(end)
        while found and not self._without_end(tail):
            stays.append(head + end)
            head, found, more = head.rpartition(end)
            tail = more + end + tail
        return next((rest[len(text) :] for text in stays[1:] + stays[:1] if rest.startswith(text)), None)

    def encode_after(self, token: int | None, text: str) -> list[int]:
        """Encodes a text that follows an end token.

        The token takes part in the encoding, since some tokens and tokenizers change the text next to them.
        """
        token = self.tokenizer.eos_token_id if token is None else token
        before = self.token_text(token)
        if self.has_names:
            ids = self.control.encode_rendered(before + text)
        else:
            ids = self.tokenizer.encode(before + text, add_special_tokens=False)
        return ids[1:] if ids[:1] == [token] else ids[len(self.tokenizer.encode(before, add_special_tokens=False)) :]

    def _without_end(self, text: str) -> str:
        """Removes control tokens and white space at the end of a text."""
        names = [self.token_text(token) for token in self.control.ids if token in self.control.texts]
        stripped = text.rstrip()
        while name := next((name for name in names if stripped.endswith(name)), ""):
            stripped = stripped.removesuffix(name).rstrip()
        return stripped


def _marked_answers(answer: Message) -> list[Message]:
    """Returns copies of an answer with a mark in the content or the last call."""
    plain = {key: value for key, value in answer.items() if key != "reasoning_content"}
    marked = [plain | {"content": _MARK}]
    if calls := plain.get("tool_calls"):
        function = calls[-1].get("function", calls[-1]) | {"arguments": {"mark": _MARK}}
        last = calls[-1] | {"function": function} if "function" in calls[-1] else function
        marked.append(plain | {"tool_calls": [*calls[:-1], last]})
    return marked


def _missing_messages(messages: Sequence[Message], suffix: str) -> list[Message]:
    """Returns the new messages whose first word is missing in the suffix.

    Templates may quote or trim the whole text.
    """
    words = [re.search(r"[A-Za-z0-9]+", message.get("content") or "") for message in messages]
    return [message for message, word in zip(messages, words, strict=True) if word and word[0] not in suffix]


def _cannot_render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> ConfigError:
    roles = ", ".join(message["role"] for message in messages)
    return ConfigError(
        f"model.name={tokenizer.name_or_path}: its chat template does not render a message ({roles}) after an "
        "assistant's, so env.max_steps must be 1 with this template; set another template "
        "(model.chat_template=FILE), or env.max_steps=1"
    )
