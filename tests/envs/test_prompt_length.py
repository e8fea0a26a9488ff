"""Tests of the prompt limit and of the amount of text that it tokenizes."""

import itertools

import pytest

from envs.prompt_length import PromptLimit
from envs.task import Example
from tests.tiny_models import LetterTokenizer


class _CallCounter(LetterTokenizer):
    """Tokenizer that counts its calls."""

    calls = 0

    def encode(self, text: str, **kwargs: object) -> list[int]:
        self.calls += 1
        return super().encode(text)


@pytest.mark.parametrize(("limit", "fits", "num_calls"), [(100, True, 0), (7, True, 1), (5, False, 1)])
def test_a_prompt_is_tokenized_only_where_it_must(limit: int, fits: bool, num_calls: int) -> None:
    tokenizer = _CallCounter()
    example = Example(({"role": "user", "content": "12+84="},), "96", 0)
    assert PromptLimit(tokenizer, limit)(example) is fits
    assert tokenizer.calls == num_calls


class _CharacterCounter(LetterTokenizer):
    """Tokenizer that counts the characters of its inputs."""

    characters = 0

    def encode(self, text: str, **kwargs: object) -> list[int]:
        self.characters += len(text)
        return super().encode(text)


def test_a_prompt_of_megabytes_is_refused_by_its_beginning() -> None:
    tokenizer = _CharacterCounter()
    limit = PromptLimit(tokenizer, 40)
    example = Example(({"role": "user", "content": "7" * 50_000_000},), "7", 0)
    assert not limit(example)
    assert limit.describe_length([example]) == ("prompt 1: more than 320 tokens, limit 40", "")
    assert tokenizer.characters < 1000
    short = Example(({"role": "user", "content": "7" * 61},), "7", 0)
    assert limit.describe_length([short]) == ("prompt 1: 61 tokens, limit 40", "")


class _RunTokenizer(LetterTokenizer):
    """Tokenizer with one token for each run of equal letters, however long."""

    def encode(self, text: str, **kwargs: object) -> list[int]:
        return [1 for _ in itertools.groupby(text)]


def test_a_prompt_whose_beginning_is_short_in_tokens_is_measured_whole() -> None:
    limit = PromptLimit(_RunTokenizer(), 40)
    fits = Example(({"role": "user", "content": "a" * 100_000 + "b"},), "", 0)
    assert limit(fits)
    beyond = Example(({"role": "user", "content": "a" * 100_000 + "bc" * 20},), "", 0)
    assert not limit(beyond)
    assert limit.describe_length([beyond]) == ("prompt 1: 41 tokens, limit 40", "")
