"""Between text and token ids: a chat becomes a prompt, and what was sampled becomes what a reward judges."""

from collections.abc import Collection, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from config.errors import ConfigError
from envs.control_tokens import control_tokens
from envs.group import SampledCompletion
from envs.task import Completion, Example


def encode_prompts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[int]]:
    """Token ids of each chat, ending where the assistant's answer begins. What messages spell stays text: control
    tokens are those of the template alone.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.name={tokenizer.name_or_path}: its tokenizer has no chat template, so messages cannot be "
            "turned into a prompt; take an instruct or chat model, or add chat_template.jinja to its folder"
        )
    chats = [list(example.messages) for example in examples]
    ids = list(
        tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)
    )
    control = control_tokens(tokenizer)
    for row, chat in enumerate(chats):
        if control.spelled_in(chat):
            ids[row] = control.encode(control.render(chat))
    return ids


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
            ConfigError: the tokenizer has no chat template, or the model no embedding of a token.
        """
        (ids,) = encode_prompts(self.tokenizer, [example])
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

    def decode(self, completions: Sequence[SampledCompletion]) -> None:
        """Fills `text` and `shown` of completions in which every token is there.

        The reward sees the text of the last turn, and the number of tokens that the model drew in all of them.
        """
        turns = [_turns(one) for one in completions]
        marked = [any(self.control.inside(turn, self.ends) for turn in of_one) for of_one in turns]
        # Decoding fails at ids of no token with some tokenizers, and what is marked no reward sees.
        last = self._texts([[] if bad else of_one[-1] for of_one, bad in zip(turns, marked, strict=True)])
        for one, bad, shown in zip(completions, marked, last, strict=True):
            one.shown = Completion(shown, one.num_drawn, one.finish_reason == "length", bad)
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
