"""Control tokens (`<|im_end|>`, `<eos>`, ...): text that only spells one is never encoded as one.

A chat template writes control tokens as text, so a tokenizer cannot tell the template's from those that a message
spells. Where a message spells one, the template is rendered with marks in place of these spellings. Then its own
control tokens are given private names, the spellings come back, and a copy of the tokenizer that knows control tokens
only by their private names encodes the whole. All other chats are encoded by the tokenizer as it is.
"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.chat_template import map_texts, render_chat, texts_in
from envs.example import Message

_ANSWER = "the-answer-goes-here"
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"  # of private names and marks; no tokenizer splits or changes them


class ControlTokens:
    """The special tokens of one tokenizer; other added tokens (`<think>`) are ordinary text.

    ids: token ids. texts: id -> how it is spelled. vocabulary: ids of all tokens. A model may have rows for more, and
    so draw an id that no token has: it stands for no text either, and is treated as a control token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {token for token, known in added.items() if known.special} | set(tokenizer.all_special_ids)
        self.texts = {token: str(added[token]) for token in sorted(special) if token in added}
        self.ids = frozenset(special)
        self.vocabulary = frozenset(tokenizer.get_vocab().values()) | self.ids
        self._text = self.vocabulary - self.ids
        self._normalized = any(added[token].normalized for token in self.texts)
        self._key = secrets.token_hex(8)  # so that no text can hold a private name
        longest_first = sorted(self.texts.values(), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def spelled_in(self, *values: Any) -> bool:
        """Whether messages or tools spell a control token, or may by normalizing."""
        return self._normalized or self.first_spelled(values) is not None

    def first_spelled(self, values: Any) -> str | None:
        """The first control token that a text in messages or tools spells as it stands."""
        found = (self._spelled.search(text) for text in texts_in(values))
        return next((match[0] for match in found if match), None)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The chat up to where the next answer begins, with private names for the template's control tokens."""
        marks: dict[str, str] = {}

        def mark(found: re.Match[str]) -> str:
            marks[self._private(f"mark {len(marks)}")] = found[0]
            return list(marks)[-1]

        marked = map_texts([messages, tools], lambda text: self._spelled.sub(mark, text))
        text = render_chat(self.tokenizer, *marked)
        named = self._spelled.sub(lambda found: self._private(found[0]), text)
        if not marks:
            return named
        return re.sub("|".join(map(re.escape, marks)), lambda found: marks[found[0]], named)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of what `render` gave, or of a part of it.

        Raises:
            ConfigError: the tokenizer is no fast one.
        """
        ids: list[int] = self._by_private_name.encode(rendered, add_special_tokens=False).ids
        return ids

    def inside(self, token_ids: Sequence[int], ends: Collection[int]) -> bool:
        """Whether a turn holds control tokens, or ids of no token, but for one of `ends` at its end."""
        if self._text.issuperset(token_ids):
            return False
        drawn = token_ids[:-1] if token_ids[-1] in ends else token_ids
        return not self._text.issuperset(drawn)

    def spelled(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, control tokens included; an id of no token is a number."""
        text = ""
        for known, run in groupby(token_ids, key=self.vocabulary.__contains__):
            if known:
                text += self.tokenizer.batch_decode([list(run)])[0]
            else:
                text += "".join(f"<no token: {token}>" for token in run)
        return text

    def _private(self, name: str) -> str:
        return f"{_OPEN}{self._key}.{name.encode().hex()}{_CLOSE}"

    @cached_property
    def _by_private_name(self) -> Tokenizer:
        """A copy of the tokenizer in which every control token has its id and its private name."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"model.name={self.tokenizer.name_or_path}: a prompt spells a control token of the model "
                f"({', '.join(list(self.texts.values())[:3])}, ...), which only a fast tokenizer (tokenizer.json) can "
                "encode as plain text; take such rows out of the data"
            )
        state = json.loads(backend.to_str())
        names = {text: self._private(text) for text in self.texts.values()}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        # Pieces of the vocabulary get these names too, so that no text can be cut into them.
        model, vocabulary = state["model"], state["model"]["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(piece, piece): token for piece, token in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [
                pair for pair in pairs if not names.keys() & {pair[0], pair[1], pair[0] + pair[1]}
            ]
        state["post_processor"] = state["truncation"] = state["padding"] = None
        copy = Tokenizer.from_str(json.dumps(state))
        wrong = [text for token, text in self.texts.items() if copy.token_to_id(names[text]) != token]
        assert not wrong, f"{wrong[0]} has another id in the copy of the tokenizer"
        return copy


@lru_cache(maxsize=4)
def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Found once for each tokenizer."""
    return ControlTokens(tokenizer)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The control token with which the chat template ends an answer; None where it writes none.

    The tokenizer's own end token may be another one: that of a base model ends a document.
    """
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # it has no answers of its own, or is no program that runs
        return None
    ids: list[int] = tokenizer.encode(text.partition(_ANSWER)[2].lstrip(), add_special_tokens=False)
    return ids[0] if ids and ids[0] in control_tokens(tokenizer).ids else None
