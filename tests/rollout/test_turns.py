"""Several turns on a real engine: one stream of ids, only ever extended, and the trainer agrees on every token."""

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
from envs.turns import Conversation, ThinkAgain
from tests.generating import collector, generation
from tests.tiny import ImmediateRewards
from torchgrpo.batches.batch import collate
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.model_loading import load_model

QUICKSTART = Path(__file__).resolve().parents[2] / "torchgrpo" / "models" / "quickstart"
EOS, REPEATS, GROUPS = 2, 4, 6


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(QUICKSTART)
    return loaded


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu"))


class Recorder(TransformersEngine):
    """Keeps what it was asked and what it drew."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, [EOS])
        self.asked: dict[int, Request] = {}
        self.drawn: list[tuple[Request, list[int]]] = []

    def submit(self, request: Request) -> None:
        self.asked[request.request_id] = request
        super().submit(request)

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        for response in responses:
            request = self.asked[response.request_id]
            self.drawn += [(request, list(c.token_ids)) for c in response.completions]
        return responses


class LastTurn(ImmediateRewards):
    """Notes what it is asked to judge."""

    def __init__(self) -> None:
        self._of_row: dict[int, list[Completion]] = {}

    @property
    def seen(self) -> list[Completion]:
        """In the order of the batch, whatever the order in which groups were answered."""
        return [one for row in sorted(self._of_row) for one in self._of_row[row]]

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Reward]:
        self._of_row[examples[0].row] = list(completions)
        return [Reward(1.0) for _ in completions]


def additions(count: int) -> list[Example]:
    return [Example(({"role": "user", "content": f"{10 + i}+{3 * i}="},), "", i) for i in range(count)]


def asked(count: int, n: int, max_tokens: int) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens)
    return [Request(i, (1, 4, 22 + i, 17, 23, 35, 5), n, sampling, seed=i) for i in range(count)]


def drawn_by(
    engine: TransformersEngine, tokenizer: Any, conversation: Conversation, requests: Sequence[Request]
) -> list[list[SampledCompletion]]:
    loop, sampling = EngineLoop(engine, timeout=600.0, wait_timeout=600.0), Sampling(max_tokens=24)
    made = generation(loop, LastTurn(), 1, sampling, tokenizer=tokenizer, conversation=conversation)
    completions = loop.run_all([made.generate(request) for request in requests])
    loop.close()
    return completions


def groups_of(
    model: Any, tokenizer: Any, steps: int, max_tokens: int = 24
) -> tuple[list[Group], Recorder, LastTurn]:
    engine, rewards = Recorder(model), LastTurn()
    conversation = Conversation(tokenizer, [ThinkAgain("+?")], steps)
    made = collector(
        engine,
        rewards,
        additions(GROUPS),
        REPEATS,
        Sampling(max_tokens=max_tokens),
        seed=3,
        tokenizer=tokenizer,
        conversation=conversation,
    )
    return made.collect(GROUPS), engine, rewards


def collected(model: Any, tokenizer: Any, steps: int, max_tokens: int = 24) -> tuple[Any, Recorder, LastTurn]:
    groups, engine, rewards = groups_of(model, tokenizer, steps, max_tokens)
    return collate(groups), engine, rewards


def test_the_ids_trained_on_are_the_ids_sampled(model: Any, tokenizer: Any) -> None:
    batch, engine, _ = collected(model, tokenizer, steps=3)
    tokens = batch.tokens
    by_prefix = {(request.prompt, tuple(ids)) for request, ids in engine.drawn}
    turns = 0
    for row in range(len(tokens.response)):
        prompt = tokens.prompt[row][tokens.prompt_mask[row]].tolist()
        length = int(tokens.response_mask[row].sum())
        response = tokens.response[row][:length].tolist()
        drawn = tokens.loss_mask[row][:length].tolist()
        begin = 0
        while begin < length:
            end = begin
            while end < length and drawn[end]:
                end += 1
            assert (tuple(prompt + response[:begin]), tuple(response[begin:end])) in by_prefix
            turns += 1
            begin = end
            while begin < length and not drawn[begin]:
                begin += 1
    assert turns == len(engine.drawn) > 2 * GROUPS * REPEATS
    assert not tokens.loss_mask[~tokens.response_mask].any()


def test_environment_tokens_are_the_templates_and_carry_no_probability(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collected(model, tokenizer, steps=2)
    written = batch.tokens.response_mask & ~batch.tokens.loss_mask
    answer = tokenizer.encode("<user>+?<assistant>", add_special_tokens=False)
    assert batch.tokens.response[written].tolist() == answer * (GROUPS * REPEATS)
    assert (batch.sample_log_prob[written] == 0).all()
    assert (batch.sample_log_prob[batch.tokens.loss_mask] < 0).all()


def test_the_trainers_log_probs_are_the_engines(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collected(model, tokenizer, steps=3)
    mask = batch.tokens.loss_mask
    for packs in (True, False):
        with torch.no_grad():
            scored = ResponseScorer(model, packs, chunk_size=64)(batch.tokens).log_prob
        torch.testing.assert_close(scored[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=1e-4)
        assert (scored[~mask] == 0).all()


def test_the_last_turn_is_judged(model: Any, tokenizer: Any) -> None:
    batch, _, rewards = collected(model, tokenizer, steps=2)
    tokens = batch.tokens
    assert len(rewards.seen) == len(batch)
    for row, judged in enumerate(rewards.seen):
        length = int(tokens.response_mask[row].sum())
        text = tokenizer.decode(tokens.response[row][:length].tolist())
        assert judged.text == text.rpartition("<user>+?<assistant>")[2].removesuffix("<eos>")
        assert judged.num_tokens == int(tokens.loss_mask[row].sum())


def test_the_texts_of_a_group_are_its_tokens(model: Any, tokenizer: Any) -> None:
    groups, _, _ = groups_of(model, tokenizer, steps=2)
    for group in groups:
        assert group.prompt_text == tokenizer.decode(list(group.prompt))
        for one in group.completions:
            whole = tokenizer.decode(one.token_ids, skip_special_tokens=True)
            assert one.text == whole and one.shown is not None and one.text.endswith(one.shown.text)
            assert one.text.count("+?") == 1


def test_with_a_silent_environment_it_is_the_engine_alone(model: Any, tokenizer: Any) -> None:
    requests = asked(4, n=3, max_tokens=8)
    silent = Conversation(tokenizer, [], 5)
    ours = drawn_by(TransformersEngine(model, [EOS]), tokenizer, silent, requests)
    plain = generate(TransformersEngine(model, [EOS]), requests)
    assert [[replace(one, sampled=[]) for one in completions] for completions in ours] == [
        response.completions for response in plain
    ]


def test_max_tokens_bounds_the_whole_response(model: Any, tokenizer: Any) -> None:
    batch, engine, rewards = collected(model, tokenizer, steps=4, max_tokens=12)
    lengths = batch.tokens.response_mask.sum(-1)
    assert int(lengths.max()) <= 12
    assert all(len(request.prompt) + request.sampling.max_tokens <= 9 + 12 for request, _ in engine.drawn)
    cut = [judged.truncated for judged in rewards.seen]
    assert all(cut)  # four turns never fit: an answer that finds no room ends the response as truncated
    ends = batch.tokens.loss_mask.gather(1, lengths[:, None] - 1)
    assert ends.all()  # and no answer is left hanging at the end


def test_tokens_do_not_depend_on_what_else_is_generated(model: Any, tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, [ThinkAgain("?")], 3)
    requests = asked(4, n=3, max_tokens=20)
    together_ = drawn_by(TransformersEngine(model, [EOS]), tokenizer, conversation, requests)
    for request, expected in zip(requests, together_, strict=True):
        (alone,) = drawn_by(TransformersEngine(model, [EOS]), tokenizer, conversation, [request])
        assert [one.token_ids for one in alone] == [one.token_ids for one in expected]


class Pushed(TransformersEngine):
    """Gets weights of a new version after every step."""

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        self.load(self.model.state_dict().items(), self.policy_version + 1)
        return responses


class Named(Recorder):
    """A pool whose every answer is of another engine."""

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        for number, response in enumerate(responses, len(self.drawn)):
            for one in response.completions:
                one.engine = f"engine {number}"
        return responses


def test_the_engine_of_a_completion_is_that_of_its_last_turn(model: Any, tokenizer: Any) -> None:
    engine = Named(model)
    conversation = Conversation(tokenizer, [ThinkAgain("?")], 3)
    ((completion,),) = drawn_by(engine, tokenizer, conversation, asked(1, n=1, max_tokens=24))
    assert len(engine.drawn) > 1 and completion.engine == f"engine {len(engine.drawn)}"


def test_every_token_has_the_version_that_drew_it(tokenizer: Any) -> None:
    engine = Pushed(load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu")), [EOS])
    conversation = Conversation(tokenizer, [ThinkAgain("?")], 3)
    (completions,) = drawn_by(engine, tokenizer, conversation, asked(1, n=2, max_tokens=24))
    for completion in completions:
        drawn = [v for v, own in zip(completion.policy_versions, completion.sampled, strict=True) if own]
        assert len(set(drawn)) >= 3 and drawn == sorted(drawn)
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert len(completion.policy_versions) == len(completion.token_ids) == len(completion.log_probs)
    assert engine.in_flight == 0
