"""Between text and token ids: a chat becomes a prompt, and what was sampled becomes what a reward judges."""

import re
from collections.abc import Collection, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.chat_template import render_prompt
from envs.control_tokens import control_tokens
from envs.group import SampledCompletion
from envs.task import Completion, Example

_OPENED_THOUGHT = re.compile(r"<think>\s*\Z")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[int]:
    """Token ids of a prompt, ending where the model goes on.

    Control tokens are those of the chat template alone: what messages spell stays text. Without a template
    (`model.chat_template=none`) the text is the user's own template, and its control tokens are control tokens.

    Raises:
        ConfigError: as `render_prompt`.
    """
    text = render_prompt(tokenizer, example)
    if not tokenizer.chat_template:  # a document: one token for its beginning, and none for its end
        plain: list[int] = tokenizer.encode(text)
        if len(plain) > 1 and plain[0] == plain[1] == tokenizer.bos_token_id:
            plain = plain[1:]
        ends = plain[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token)
        return plain[:-1] if ends else plain
    control = control_tokens(tokenizer)
    if control.spelled_in(example.messages, example.tools, example.prefill):
        return control.encode(control.render(example.messages, example.tools) + example.prefill)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def answer_prefill(prompt_text: str, prefill: str = "") -> str:
    """The beginning of the answer in a prompt: an opened thought, then the prefill."""
    opened = _OPENED_THOUGHT.search(prompt_text[: len(prompt_text) - len(prefill)])
    return (opened[0] if opened else "") + prefill


class Encoder:
    """A tokenizer as groups need it.

    Args:
        ends: tokens that may end a turn of the model, the tokenizer's end token apart.
        embeddings: rows of the model's embedding; None: not known.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = (), embeddings: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.embeddings = embeddings
        self.control = control_tokens(tokenizer)
        self.ends = frozenset((tokenizer.eos_token_id, *ends))

    def encode(self, example: Example) -> tuple[int, ...]:
        """The prompt.

        Raises:
            ConfigError: the chat template refuses the messages, or the model has no embedding of a token.
        """
        ids = encode_prompt(self.tokenizer, example)
        if self.embeddings is not None and max(ids) >= self.embeddings:
            beyond = max(ids)
            raise ConfigError(
                f"the prompt of row {example.row} has the token {self.tokenizer.convert_ids_to_tokens(beyond)!r}, and "
                f"its id {beyond} lies beyond the {self.embeddings} rows of the model's embedding: take the tokenizer "
                "that the model was trained with, or `model.resize_token_embeddings(len(tokenizer))` and save both"
            )
        return tuple(ids)

    def prompt_text(self, prompt: Sequence[int]) -> str:
        """The prompt as the model reads it, chat template included."""
        (text,) = self.tokenizer.batch_decode([list(prompt)])
        return text

    def decode(self, completions: Sequence[SampledCompletion], prefill: str = "") -> None:
        """Fills `text` and `shown` of completions in which every token is there.

        The reward sees the text of the last turn, and the number of tokens that the model drew in all of them.

        prefill: the beginning of the first turn that the prompt holds.
        """
        turns = [_turns(one) for one in completions]
        marked = [any(self.control.inside(turn, self.ends) for turn in of_one) for of_one in turns]
        # Decoding fails at ids of no token with some tokenizers, and what is marked no reward sees.
        last = self._texts([[] if bad else of_one[-1] for of_one, bad in zip(turns, marked, strict=True)])
        for one, of_one, bad, shown in zip(completions, turns, marked, last, strict=True):
            start = prefill
            if len(of_one) > 1:  # the chat template wrote it after the environment's reply
                before = one.token_ids[: len(one.token_ids) - len(of_one[-1])]
                start = answer_prefill(self.prompt_text(before))
            one.shown = Completion(shown, one.num_drawn, one.finish_reason == "length", bad, start)
            if bad:
                one.text = self.control.spelled(one.token_ids)
            elif not one.sampled:
                one.text = shown
            else:
                (one.text,) = self._texts([one.token_ids])

    def _texts(self, rows: list[list[int]]) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts


def _turns(completion: SampledCompletion) -> list[list[int]]:
    """The ids of each of the model's turns: the runs between those that the environment wrote."""
    if not completion.sampled:
        return [completion.token_ids]
    written = zip(completion.token_ids, completion.sampled, strict=False)
    runs = groupby(written, key=lambda pair: pair[1])
    return [[token for token, _ in run] for own, run in runs if own] or [[]]
