"""Encodes chats as prompt tokens, and decodes sampled tokens to the inputs of rewards."""

import re
from collections.abc import Collection, Sequence
from itertools import groupby, pairwise

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.chat_template import convert_refusals, example_place, render_prompt
from envs.control_tokens import control_tokens
from envs.group import SampledCompletion
from envs.task import Completion, Example

_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[int]:
    """Encodes the prompt of an example as token ids.

    Only the chat template adds control tokens and other added tokens such as `<tool_call>`; a token spelled in a
    message or in a tool's schema is encoded as plain text. A prefill may hold added tokens that are no control tokens,
    such as `<think>`. Without a template (`model.chat_template=none`) tokens in the text are tokens.

    Raises:
        ConfigError: as `render_prompt`.
    """
    if not tokenizer.chat_template:  # a document: one begin token and no end token
        text = render_prompt(tokenizer, example)
        plain: list[int] = tokenizer.encode(text)
        if len(plain) > 1 and plain[0] == plain[1] == tokenizer.bos_token_id:
            plain = plain[1:]
        ends = plain[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token)
        return plain[:-1] if ends else plain
    control = control_tokens(tokenizer)
    if control.spells_control_token(example.messages, example.tools) or control.first_spelled_token(example.prefill):
        with convert_refusals(example_place(example), example.messages):
            rendered = control.render_with_private_names(example.messages, example.tools)
        return control.encode_rendered(rendered + control.name_prefill(example.prefill))
    ids: list[int] = tokenizer.encode(render_prompt(tokenizer, example), add_special_tokens=False)
    return ids


def answer_prefill(prompt_text: str, prefill: str = "") -> str:
    """Returns the beginning of the answer in a prompt: an open `<think>`, then the prefill."""
    opened = _OPEN_THOUGHT.search(prompt_text[: len(prompt_text) - len(prefill)])
    return (opened[0] if opened else "") + prefill


class ChatEncoder:
    """Encoder of prompts and decoder of completions for one tokenizer.

    Args:
        ends: tokens that may end a turn of the model, in addition to the tokenizer's end token.
        embeddings: rows of the model's embedding; None if unknown.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = (), embeddings: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.embeddings = embeddings
        self.control = control_tokens(tokenizer)
        self.ends = frozenset((tokenizer.eos_token_id, *ends))

    def encode(self, example: Example) -> tuple[int, ...]:
        """Encodes the prompt of an example as token ids.

        Raises:
            ConfigError: the chat template refuses the messages, the prompt has no tokens, or the model has no
                embedding of a token.
        """
        ids = encode_prompt(self.tokenizer, example)
        if not ids:
            raise ConfigError(
                f"the prompt of row {example.row} has no tokens: the tokenizer drops its text "
                f"{render_prompt(self.tokenizer, example)!r}. Use a chat template that adds text to messages, or the "
                "tokenizer of the model's training"
            )
        if self.embeddings is not None and max(ids) >= self.embeddings:
            token = max(ids)
            raise ConfigError(
                f"the prompt of row {example.row} has the token "
                f"{self.tokenizer.convert_ids_to_tokens(token)!r}, whose id {token} is beyond the "
                f"{self.embeddings} rows of the model's embedding. Use the tokenizer of the model's "
                "training, or call `model.resize_token_embeddings(len(tokenizer))` and save both"
            )
        return tuple(ids)

    def prompt_text(self, prompt: Sequence[int]) -> str:
        """Decodes a prompt, including the text of the chat template."""
        (text,) = self.tokenizer.batch_decode([list(prompt)])
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token, with a space where it begins a word."""
        decode = self.tokenizer.batch_decode
        singles: list[str] = decode([[token] for token in token_ids])
        pairs: list[str] = decode([list(pair) for pair in pairwise(token_ids)])
        return singles[:1] + [pair.removeprefix(single) for single, pair in zip(singles, pairs, strict=False)]

    def decode(self, completions: Sequence[SampledCompletion], prefill: str = "") -> None:
        """Sets `text` and `reward_input` of finished completions.

        The reward reads the text of the last turn, and the number of tokens sampled in all turns.

        prefill: beginning of the first turn in the prompt.
        """
        turns = [_split_turns(one) for one in completions]
        invalid = [any(self.control.has_control_tokens(turn, self.ends) for turn in each) for each in turns]
        # Some tokenizers fail to decode ids without a token, and no reward reads an invalid completion.
        texts = self._decode_rows(
            [[] if is_invalid else own_turns[-1] for own_turns, is_invalid in zip(turns, invalid, strict=True)]
        )
        for one, own_turns, is_invalid, text in zip(completions, turns, invalid, texts, strict=True):
            start = prefill
            if len(own_turns) > 1:  # the chat template wrote a prefill after the environment's reply
                *_, last = one.sequences(())
                before = (*last.prompt, *last.token_ids[: len(last.token_ids) - len(own_turns[-1])])
                start = answer_prefill(self.prompt_text(before))
            one.reward_input = Completion(
                text, one.num_sampled_tokens, one.finish_reason == "length", is_invalid, start
            )
            if is_invalid:
                one.text = self.control.decode_with_control_tokens(one.token_ids)
            elif not one.sampled_mask:
                one.text = text
            else:
                (one.text,) = self._decode_rows([one.token_ids])

    def _decode_rows(self, rows: list[list[int]]) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts


def _split_turns(completion: SampledCompletion) -> list[list[int]]:
    """Splits a completion into the token ids of the model's turns."""
    if completion.turns:
        return [completion.token_ids[turn.start : turn.end] for turn in completion.turns]
    if not completion.sampled_mask:
        return [completion.token_ids]
    tokens = zip(completion.token_ids, completion.sampled_mask, strict=False)
    runs = groupby(tokens, key=lambda pair: pair[1])
    return [[token for token, _ in run] for is_sampled, run in runs if is_sampled] or [[]]
