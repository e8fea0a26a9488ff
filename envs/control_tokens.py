"""Finds control tokens in texts and turns, and encodes spelled tokens as plain text.

A chat template writes control tokens as text. So a tokenizer cannot distinguish tokens of the template from tokens
spelled in a message, in the arguments of a call or in the schema of a tool. If a chat spells one, the encoding takes
these steps:

1. The template is rendered with marks in the spelled tokens (`SpelledTokens`).
2. The template's own tokens get private names, and the marks become the spelled text again.
3. A copy of the tokenizer, whose tokens have only the private names, encodes the text.

All other chats are encoded by the tokenizer itself.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.chat_template import render_chat, separate_thoughts, template_text
from envs.example import Message
from envs.spelled_tokens import SpelledTokens

_ANSWER = "the-answer-goes-here"
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"  # delimiters of private names; no tokenizer splits or changes them
_WORDS = re.compile(r"[\w\s\u2581]*")


class ControlTokens:
    """Tokens of one tokenizer that only the chat template may write into a prompt.

    ids: ids of the control tokens, which are the special tokens. texts: id -> text of the control tokens. vocabulary:
    ids of all tokens. A model whose embedding has more rows can sample ids without a token, which count as control
    tokens.

    Other added tokens, such as `<think>` and `<tool_call>`, are ordinary text for a model that samples them. In a
    prompt only the template may write them: a message that spells one is encoded as plain text. Added tokens of words
    or white space are text everywhere.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        self.texts = {token: str(added[token]) for token in sorted(special) if token in added}
        self.ids = frozenset(special)
        self.vocabulary = frozenset(tokenizer.get_vocab().values()) | self.ids
        self._text_ids = self.vocabulary - self.ids
        others = {
            token: str(entry)
            for token, entry in sorted(added.items())
            if token not in special and not _WORDS.fullmatch(str(entry))
        }
        self._template_texts = self.texts | others
        has_normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None) is not None
        self._has_normalized_tokens = has_normalizer and any(added[token].normalized for token in self._template_texts)
        self._key = secrets.token_hex(8)  # random, so that no text can contain a private name
        self._control = SpelledTokens(self.texts.values())
        self._marks = SpelledTokens(self._template_texts.values())

    def spells_control_token(self, *values: Any) -> bool:
        """Whether messages or tools may spell a token of the template."""
        return self._has_normalized_tokens or self._marks.is_spelled(values, template_text(self.tokenizer))

    def first_spelled_token(self, values: Any) -> str | None:
        """Returns the first control token spelled in messages or tools, without normalization, or None."""
        found = (self._control.pattern.search(text) for text in texts_in(values))
        return next((match[0] for match in found if match), None)

    def render_with_private_names(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), add_generation_prompt: bool = True
    ) -> str:
        """Renders a chat with private names for the template's tokens.

        add_generation_prompt: whether the text ends with the beginning of the model's answer.
        """
        with_thoughts = separate_thoughts(self.tokenizer, messages, tools)
        marked_messages, marked_tools = self._marks.mark([with_thoughts, tools], template_text(self.tokenizer))
        text = render_chat(self.tokenizer, marked_messages, marked_tools, add_generation_prompt)
        return self._marks.unmark(self._marks.pattern.sub(lambda match: self.private_name(match[0]), text))

    def name_prefill(self, prefill: str) -> str:
        """Gives private names to tokens such as `<think>` in a prefill.

        Control tokens stay text.
        """
        control = set(self.texts.values())
        return self._marks.pattern.sub(
            lambda match: match[0] if match[0] in control else self.private_name(match[0]), prefill
        )

    def encode_rendered(self, text: str) -> list[int]:
        """Encodes the text of `render_with_private_names`, or a segment of the text.

        Raises:
            ConfigError: the tokenizer is not a fast tokenizer.
        """
        ids: list[int] = self._private_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def has_control_tokens(self, token_ids: Sequence[int], ends: Collection[int]) -> bool:
        """Whether a turn has control tokens or ids without a token.

        One of `ends` may be the last token.
        """
        if self._text_ids.issuperset(token_ids):
            return False
        content_ids = token_ids[:-1] if token_ids[-1] in ends else token_ids
        return not self._text_ids.issuperset(content_ids)

    def decode_with_control_tokens(self, token_ids: Sequence[int]) -> str:
        """Decodes tokens including control tokens; an id without a token becomes a number."""
        text = ""
        for has_token, run in groupby(token_ids, key=self.vocabulary.__contains__):
            if has_token:
                text += self.tokenizer.batch_decode([list(run)])[0]
            else:
                text += "".join(f"<no token: {token}>" for token in run)
        return text

    def private_name(self, name: str) -> str:
        """Returns the private name of a token's text."""
        return f"{_OPEN}{self._key}.{name.encode().hex()}{_CLOSE}"

    @cached_property
    def _private_tokenizer(self) -> Tokenizer:
        """Copy of the tokenizer with private names for the template's tokens, and equal ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"model.name={self.tokenizer.name_or_path}: a prompt contains the text of a control token of "
                f"the model ({', '.join(list(self.texts.values())[:3])}, ...), which only a fast tokenizer "
                "(tokenizer.json) can encode as plain text; remove such rows from the data"
            )
        state = json.loads(backend.to_str())
        names = {text: self.private_name(text) for text in self._template_texts.values()}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        # Vocabulary entries get the private names too, so that no text can be split into a control token.
        model, vocabulary = state["model"], state["model"]["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(piece, piece): token for piece, token in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if not names.keys() & {pair[0], pair[1], pair[0] + pair[1]}]
        state["post_processor"] = state["truncation"] = state["padding"] = None
        copy = Tokenizer.from_str(json.dumps(state))
        wrong = [text for token, text in self._template_texts.items() if copy.token_to_id(names[text]) != token]
        assert not wrong, f"{wrong[0]} has another id in the copy of the tokenizer"
        return copy


@lru_cache(maxsize=4)
def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Returns the control tokens of a tokenizer, cached by tokenizer."""
    return ControlTokens(tokenizer)


def turn_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the control token with which the chat template ends an answer, or None.

    The tokenizer's end token may differ: a base model's end token ends a document.
    """
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # the template renders no answers, or fails
        return None
    ids: list[int] = tokenizer.encode(text.partition(_ANSWER)[2].lstrip(), add_special_tokens=False)
    return ids[0] if ids and ids[0] in control_tokens(tokenizer).ids else None


def texts_in(value: Any) -> Iterator[str]:
    """Yields every string in a JSON value, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from texts_in(key)
            yield from texts_in(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from texts_in(inside)
