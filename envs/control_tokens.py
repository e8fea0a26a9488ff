"""Finds control tokens in texts and turns, and encodes spelled ones as plain text.

A chat template writes control tokens as text. So a tokenizer cannot distinguish control tokens of the template from
control tokens spelled in a message. If a message spells one, the encoding takes these steps:

1. The template is rendered with marks in place of the spelled control tokens.
2. The template's own control tokens get private names, and the marks become the spelled text again.
3. A copy of the tokenizer, whose control tokens have only the private names, encodes the text.

All other chats are encoded by the tokenizer itself.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.chat_template import render_chat
from envs.example import Message

_ANSWER = "the-answer-goes-here"
_OPEN, _CLOSE = (
    "\U000f0000",
    "\U000f0001",
)  # delimiters of private names and marks; no tokenizer splits or changes them


class ControlTokens:
    """Special tokens of one tokenizer; other added tokens such as `<think>` are ordinary text.

    ids: ids of the control tokens. texts: id -> text. vocabulary: ids of all tokens. A model whose embedding has more
    rows can sample ids without a token, which count as control tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        self.texts = {token: str(added[token]) for token in sorted(special) if token in added}
        self.ids = frozenset(special)
        self.vocabulary = frozenset(tokenizer.get_vocab().values()) | self.ids
        self._text_ids = self.vocabulary - self.ids
        self._has_normalized_tokens = any(added[token].normalized for token in self.texts)
        self._key = secrets.token_hex(8)  # random, so that no text can contain a private name
        longest_first = sorted(self.texts.values(), key=len, reverse=True)
        self._token_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def spells_control_token(self, *values: Any) -> bool:
        """Whether messages or tools spell a control token, or may spell one after normalization."""
        return self._has_normalized_tokens or self.first_spelled_token(values) is not None

    def first_spelled_token(self, values: Any) -> str | None:
        """Returns the first control token spelled in messages or tools, without normalization, or None."""
        found = (self._token_pattern.search(text) for text in texts_in(values))
        return next((match[0] for match in found if match), None)

    def render_with_private_names(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Renders a chat up to the answer, with private names for the template's control tokens."""
        marks: dict[str, str] = {}

        def add_mark(match: re.Match[str]) -> str:
            marks[self._private_name(f"mark {len(marks)}")] = match[0]
            return list(marks)[-1]

        marked_values = map_texts([messages, tools], lambda text: self._token_pattern.sub(add_mark, text))
        text = render_chat(self.tokenizer, *marked_values)
        text_with_names = self._token_pattern.sub(lambda match: self._private_name(match[0]), text)
        if not marks:
            return text_with_names
        return re.sub("|".join(map(re.escape, marks)), lambda match: marks[match[0]], text_with_names)

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

    def _private_name(self, name: str) -> str:
        return f"{_OPEN}{self._key}.{name.encode().hex()}{_CLOSE}"

    @cached_property
    def _private_tokenizer(self) -> Tokenizer:
        """Copy of the tokenizer whose control tokens have private names and the same ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"model.name={self.tokenizer.name_or_path}: a prompt contains the text of a control token of "
                f"the model ({', '.join(list(self.texts.values())[:3])}, ...), which only a fast tokenizer "
                "(tokenizer.json) can encode as plain text; remove such rows from the data"
            )
        state = json.loads(backend.to_str())
        names = {text: self._private_name(text) for text in self.texts.values()}
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
        wrong = [text for token, text in self.texts.items() if copy.token_to_id(names[text]) != token]
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


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Copies a JSON value with `change` applied to every string, including the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_texts(inside, change) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(inside, change) for inside in value]
    return value
