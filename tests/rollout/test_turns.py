"""Tests of several turns on a real engine: token ids, masks, versions and log-probs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from config.schema.models import ModelConfig
from envs.group import Group, SampledCompletion, Sampling
from envs.task import Completion, Example, Reward
from envs.turns import Conversation, ReflectionPrompt
from tests.group_collection import make_group_collector, make_group_rollout
from tests.tiny_models import ImmediateRewards
from torchgrpo.batches.batch import collate
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.training.model_loading import load_model
from torchgrpo.training.response_scorer import ResponseScorer

QUICKSTART = Path(__file__).resolve().parents[2] / "torchgrpo" / "models" / "quickstart"
EOS, REPEATS, GROUPS = 2, 4, 6


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(QUICKSTART)
    return loaded


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu"))


class RecordingEngine(TransformersEngine):
    """Engine that records its requests and the completions it samples."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, [EOS])
        self.requests_by_id: dict[int, Request] = {}
        self.sampled_turns: list[tuple[Request, list[int]]] = []

    def submit(self, request: Request) -> None:
        self.requests_by_id[request.request_id] = request
        super().submit(request)

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        for response in responses:
            request = self.requests_by_id[response.request_id]
            self.sampled_turns += [(request, list(c.token_ids)) for c in response.completions]
        return responses


class RecordingRewards(ImmediateRewards):
    """Reward service that records the completions it scores."""

    def __init__(self) -> None:
        self.completions_by_row: dict[int, list[Completion]] = {}

    @property
    def scored_completions(self) -> list[Completion]:
        """Completions in the order of the batch's rows, not the order of scoring."""
        return [one for row in sorted(self.completions_by_row) for one in self.completions_by_row[row]]

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Reward]:
        self.completions_by_row[examples[0].row] = list(completions)
        return [Reward(1.0) for _ in completions]


def addition_examples(count: int) -> list[Example]:
    return [Example(({"role": "user", "content": f"{10 + i}+{3 * i}="},), "", i) for i in range(count)]


def make_requests(count: int, n: int, max_tokens: int) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens)
    return [Request(i, (1, 4, 22 + i, 17, 23, 35, 5), n, sampling, seed=i) for i in range(count)]


def sample_group(
    engine: TransformersEngine, tokenizer: Any, conversation: Conversation, requests: Sequence[Request]
) -> list[list[SampledCompletion]]:
    loop, sampling = EngineLoop(engine, timeout=600.0, wait_timeout=600.0), Sampling(max_tokens=24)
    rollout = make_group_rollout(loop, RecordingRewards(), 1, sampling, tokenizer=tokenizer, conversation=conversation)
    completions = loop.run_all([rollout.generate(request) for request in requests])
    loop.close()
    return completions


def collect_groups(
    model: Any, tokenizer: Any, steps: int, max_tokens: int = 24
) -> tuple[list[Group], RecordingEngine, RecordingRewards]:
    engine, rewards = RecordingEngine(model), RecordingRewards()
    conversation = Conversation(tokenizer, [ReflectionPrompt("+?")], steps)
    rollout = make_group_collector(
        engine,
        rewards,
        addition_examples(GROUPS),
        REPEATS,
        Sampling(max_tokens=max_tokens),
        seed=3,
        tokenizer=tokenizer,
        conversation=conversation,
    )
    return rollout.collect(GROUPS), engine, rewards


def collect_batch(
    model: Any, tokenizer: Any, steps: int, max_tokens: int = 24
) -> tuple[Any, RecordingEngine, RecordingRewards]:
    groups, engine, rewards = collect_groups(model, tokenizer, steps, max_tokens)
    return collate(groups), engine, rewards


def test_trained_token_ids_equal_sampled_token_ids(model: Any, tokenizer: Any) -> None:
    batch, engine, _ = collect_batch(model, tokenizer, steps=3)
    tokens = batch.tokens
    sampled_segments = {(request.prompt, tuple(ids)) for request, ids in engine.sampled_turns}
    num_turns = 0
    for row in range(len(tokens.response)):
        prompt = tokens.prompt[row][tokens.prompt_mask[row]].tolist()
        length = int(tokens.response_mask[row].sum())
        response = tokens.response[row][:length].tolist()
        sampled_mask = tokens.loss_mask[row][:length].tolist()
        begin = 0
        while begin < length:
            end = begin
            while end < length and sampled_mask[end]:
                end += 1
            assert (tuple(prompt + response[:begin]), tuple(response[begin:end])) in sampled_segments
            num_turns += 1
            begin = end
            while begin < length and not sampled_mask[begin]:
                begin += 1
    assert num_turns == len(engine.sampled_turns) > 2 * GROUPS * REPEATS
    assert not tokens.loss_mask[~tokens.response_mask].any()


def test_environment_tokens_come_from_the_template_and_have_log_prob_zero(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collect_batch(model, tokenizer, steps=2)
    environment_mask = batch.tokens.response_mask & ~batch.tokens.loss_mask
    answer = tokenizer.encode("<user>+?<assistant>", add_special_tokens=False)
    assert batch.tokens.response[environment_mask].tolist() == answer * (GROUPS * REPEATS)
    assert (batch.sample_log_prob[environment_mask] == 0).all()
    assert (batch.sample_log_prob[batch.tokens.loss_mask] < 0).all()


def test_trainer_log_probs_equal_engine_log_probs(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collect_batch(model, tokenizer, steps=3)
    mask = batch.tokens.loss_mask
    for packs in (True, False):
        with torch.no_grad():
            scored = ResponseScorer(model, packs, chunk_size=64)(batch.tokens).log_prob
        torch.testing.assert_close(scored[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=1e-4)
        assert (scored[~mask] == 0).all()


def test_rewards_receive_the_last_turn(model: Any, tokenizer: Any) -> None:
    batch, _, rewards = collect_batch(model, tokenizer, steps=2)
    tokens = batch.tokens
    assert len(rewards.scored_completions) == len(batch)
    for row, scored_completion in enumerate(rewards.scored_completions):
        length = int(tokens.response_mask[row].sum())
        text = tokenizer.decode(tokens.response[row][:length].tolist())
        assert scored_completion.text == text.rpartition("<user>+?<assistant>")[2].removesuffix("<eos>")
        assert scored_completion.num_tokens == int(tokens.loss_mask[row].sum())


def test_texts_of_a_group_equal_its_decoded_tokens(model: Any, tokenizer: Any) -> None:
    groups, _, _ = collect_groups(model, tokenizer, steps=2)
    for group in groups:
        assert group.prompt_text == tokenizer.decode(list(group.prompt))
        for one in group.completions:
            decoded_text = tokenizer.decode(one.token_ids, skip_special_tokens=True)
            assert (
                one.text == decoded_text and one.reward_input is not None and one.text.endswith(one.reward_input.text)
            )
            assert one.text.count("+?") == 1


def test_completions_without_replies_equal_engine_completions(model: Any, tokenizer: Any) -> None:
    requests = make_requests(4, n=3, max_tokens=8)
    conversation = Conversation(tokenizer, [], 5)
    rollout_completions = sample_group(TransformersEngine(model, [EOS]), tokenizer, conversation, requests)
    engine_responses = generate(TransformersEngine(model, [EOS]), requests)
    assert [[replace(one, sampled_mask=[]) for one in completions] for completions in rollout_completions] == [
        response.completions for response in engine_responses
    ]


def test_max_tokens_bounds_the_whole_response(model: Any, tokenizer: Any) -> None:
    batch, engine, rewards = collect_batch(model, tokenizer, steps=4, max_tokens=12)
    lengths = batch.tokens.response_mask.sum(-1)
    assert int(lengths.max()) <= 12
    assert all(len(request.prompt) + request.sampling.max_tokens <= 9 + 12 for request, _ in engine.sampled_turns)
    truncated_flags = [scored_completion.truncated for scored_completion in rewards.scored_completions]
    assert all(truncated_flags)  # four turns never fit: a reply without room ends the response as truncated
    ends = batch.tokens.loss_mask.gather(1, lengths[:, None] - 1)
    assert ends.all()  # no reply is the end of a response


def test_tokens_do_not_depend_on_concurrent_requests(model: Any, tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, [ReflectionPrompt("?")], 3)
    requests = make_requests(4, n=3, max_tokens=20)
    together = sample_group(TransformersEngine(model, [EOS]), tokenizer, conversation, requests)
    for request, expected in zip(requests, together, strict=True):
        (alone,) = sample_group(TransformersEngine(model, [EOS]), tokenizer, conversation, [request])
        assert [one.token_ids for one in alone] == [one.token_ids for one in expected]


class PushingEngine(TransformersEngine):
    """Engine that loads weights of a new version after every step."""

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        self.load(self.model.state_dict().items(), self.policy_version + 1)
        return responses


class RenamingEngine(RecordingEngine):
    """Engine whose every answer has another engine name, as in a pool."""

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        for number, response in enumerate(responses, len(self.sampled_turns)):
            for one in response.completions:
                one.engine = f"engine {number}"
        return responses


def test_the_engine_of_a_completion_is_that_of_its_last_turn(model: Any, tokenizer: Any) -> None:
    engine = RenamingEngine(model)
    conversation = Conversation(tokenizer, [ReflectionPrompt("?")], 3)
    ((completion,),) = sample_group(engine, tokenizer, conversation, make_requests(1, n=1, max_tokens=24))
    assert len(engine.sampled_turns) > 1 and completion.engine == f"engine {len(engine.sampled_turns)}"


def test_every_token_has_the_version_that_sampled_it(tokenizer: Any) -> None:
    engine = PushingEngine(load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu")), [EOS])
    conversation = Conversation(tokenizer, [ReflectionPrompt("?")], 3)
    (completions,) = sample_group(engine, tokenizer, conversation, make_requests(1, n=2, max_tokens=24))
    for completion in completions:
        sampled_versions = [
            v for v, own in zip(completion.policy_versions, completion.sampled_mask, strict=True) if own
        ]
        assert len(set(sampled_versions)) >= 3 and sampled_versions == sorted(sampled_versions)
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert len(completion.policy_versions) == len(completion.token_ids) == len(completion.log_probs)
    assert engine.in_flight == 0
