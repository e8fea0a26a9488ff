"""The environment as TorchRL sees it, and what it tells the prompt source."""

import itertools

import pytest
import torch
from envs.token_env import TokenEnv
from rollout.collector import EnginePolicy, Rollouts

from envs.group import Sampling
from envs.prompt_length import PromptLimit
from envs.task import Example
from rollout.engines.transformers_engine import TransformersEngine
from tests.tiny import EOS, LengthReward, LetterTokenizer, numbered_examples, tiny_llama


def test_every_group_is_observed_once_and_nothing_stays_in_flight() -> None:
    seen: list[tuple[Example, float]] = []
    examples = numbered_examples(20)
    env = TokenEnv(
        lambda n: [examples.pop(0) for _ in range(n)],
        LetterTokenizer(),
        LengthReward(),
        4,
        lambda example, success: seen.append((example, success)),
    )
    engine = TransformersEngine(tiny_llama(), [EOS])
    rollouts = Rollouts(env, EnginePolicy(engine, Sampling(max_tokens=5), 4, seed=0, timeout=60))
    batch = rollouts.collect(3)
    assert [example.row for example, _ in seen] == [0, 1, 2]
    reached = (batch["next", "reward"] >= 1).view(3, 4).double().mean(1)
    assert [success for _, success in seen] == pytest.approx(reached.tolist())
    assert env.in_flight == {}
    assert batch["group_id"][:, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.equal(batch["tokens", "response_mask"], batch["tokens", "loss_mask"])


class _Counting(LetterTokenizer):
    """Notes how often a prompt is tokenized in full."""

    calls = 0

    def apply_chat_template(self, chats: object, tokenize: bool = True, **kwargs: object) -> object:
        if not tokenize:
            return "".join(turn["content"] for turn in chats)  # type: ignore[attr-defined]
        self.calls += 1
        return super().apply_chat_template(chats)  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "fits", "tokenized"), [(100, True, 0), (7, True, 1), (5, False, 1)])
def test_a_prompt_is_tokenized_only_where_its_bytes_do_not_decide(
    limit: int, fits: bool, tokenized: int
) -> None:
    tokenizer = _Counting()
    example = Example(({"role": "user", "content": "12+84="},), "96", 0)
    assert PromptLimit(tokenizer, limit)(example) is fits
    assert tokenizer.calls == tokenized


class _PerCharacter(LetterTokenizer):
    """Counts the characters that it is given to tokenize."""

    characters = 0

    def apply_chat_template(self, chats: list[list[dict[str, str]]], **kwargs: object) -> list[list[int]]:
        if kwargs.get("tokenize") is False:
            return "".join(turn["content"] for turn in chats)  # type: ignore[arg-type, call-overload, return-value]
        self.characters += sum(len(turn["content"]) for chat in chats for turn in chat)
        return super().apply_chat_template(chats)


def test_a_prompt_of_megabytes_is_refused_by_its_beginning() -> None:
    tokenizer = _PerCharacter()
    limit = PromptLimit(tokenizer, 40)  # type: ignore[arg-type]
    example = Example(({"role": "user", "content": "7" * 50_000_000},), "7", 0)
    assert not limit(example)
    assert limit.told([example]) == "prompt 1: more than 320 tokens, limit 40"
    assert tokenizer.characters < 1000
    short = Example(({"role": "user", "content": "7" * 61},), "7", 0)
    assert limit.told([short]) == "prompt 1: 61 tokens, limit 40"


class _Runs(LetterTokenizer):
    """One token for a run of equal letters, however long: the beginning says nothing of the rest."""

    def apply_chat_template(self, chats: list[list[dict[str, str]]], **kwargs: object) -> list[list[int]]:
        if kwargs.get("tokenize") is False:
            return "".join(turn["content"] for turn in chats)  # type: ignore[arg-type, call-overload, return-value]
        return [[1 for turn in chat for _ in itertools.groupby(turn["content"])] for chat in chats]


def test_a_prompt_whose_beginning_is_short_in_tokens_is_measured_whole() -> None:
    limit = PromptLimit(_Runs(), 40)  # type: ignore[arg-type]
    fits = Example(({"role": "user", "content": "a" * 100_000 + "b"},), "", 0)
    assert limit(fits)
    beyond = Example(({"role": "user", "content": "a" * 100_000 + "bc" * 20},), "", 0)
    assert not limit(beyond)
    assert limit.told([beyond]) == "prompt 1: 41 tokens, limit 40"
