"""Several turns on a real engine: one stream of ids, only ever extended, and the trainer agrees on every token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from envs.token_env import TokenEnv
from rollout.collector import EnginePolicy, Rollouts
from rollout.turns import TurnEngine
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from config.schema import ModelConfig
from envs.group import Sampling
from envs.task import Completion, Example, Reward
from envs.turns import Conversation, ThinkAgain
from rollout.engines.sampler import Request, Response, generate
from rollout.engines.transformers_engine import TransformersEngine
from tests.tiny import ImmediateRewards
from training.forward import ResponseScorer
from training.model import load_model

QUICKSTART = Path(__file__).resolve().parents[2] / "models" / "quickstart"
EOS, REPEATS, GROUPS = 2, 4, 6


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(QUICKSTART)
    return loaded


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(ModelConfig(name=str(QUICKSTART)), [torch.device("cpu")])


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


def collected(model: Any, tokenizer: Any, steps: int, max_tokens: int = 24) -> tuple[Any, Recorder, LastTurn]:
    engine, rewards = Recorder(model), LastTurn()
    conversation: Conversation[Any] = Conversation(tokenizer, [ThinkAgain("+?")], steps)
    policy = EnginePolicy(
        TurnEngine(engine, conversation), Sampling(max_tokens=max_tokens), REPEATS, seed=3, timeout=60.0
    )
    examples = iter(additions(GROUPS))
    env = TokenEnv(lambda n: [next(examples) for _ in range(n)], tokenizer, rewards, REPEATS)  # type: ignore[arg-type]
    return Rollouts(env, policy).collect(GROUPS), engine, rewards


def test_the_ids_trained_on_are_the_ids_sampled(model: Any, tokenizer: Any) -> None:
    batch, engine, _ = collected(model, tokenizer, steps=3)
    tokens = batch["tokens"]
    by_prefix = {(request.prompt, tuple(ids)) for request, ids in engine.drawn}
    turns = 0
    for row in range(len(tokens["response"])):
        prompt = tokens["prompt"][row][tokens["prompt_mask"][row]].tolist()
        length = int(tokens["response_mask"][row].sum())
        response = tokens["response"][row][:length].tolist()
        drawn = tokens["loss_mask"][row][:length].tolist()
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
    assert not tokens["loss_mask"][~tokens["response_mask"]].any()


def test_environment_tokens_are_the_templates_and_carry_no_probability(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collected(model, tokenizer, steps=2)
    written = batch["tokens", "response_mask"] & ~batch["tokens", "loss_mask"]
    answer = tokenizer.encode("<user>+?<assistant>", add_special_tokens=False)
    assert batch["tokens", "response"][written].tolist() == answer * (GROUPS * REPEATS)
    assert (batch["sample_log_prob"][written] == 0).all()
    assert (batch["sample_log_prob"][batch["tokens", "loss_mask"]] < 0).all()


def test_the_trainers_log_probs_are_the_engines(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collected(model, tokenizer, steps=3)
    mask = batch["tokens", "loss_mask"]
    for share in (True, False):
        with torch.no_grad():
            scored = ResponseScorer(model, REPEATS, share, chunk_size=64)(batch).log_prob
        torch.testing.assert_close(scored[mask], batch["sample_log_prob"][mask], atol=1e-4, rtol=1e-4)
        assert (scored[~mask] == 0).all()


def test_the_last_turn_is_judged(model: Any, tokenizer: Any) -> None:
    batch, _, rewards = collected(model, tokenizer, steps=2)
    tokens = batch["tokens"]
    assert len(rewards.seen) == len(batch)
    for row, judged in enumerate(rewards.seen):
        length = int(tokens["response_mask"][row].sum())
        text = tokenizer.decode(tokens["response"][row][:length].tolist())
        assert judged.text == text.rpartition("<user>+?<assistant>")[2].removesuffix("<eos>")
        assert judged.num_tokens == int(tokens["loss_mask"][row].sum())


def test_with_a_silent_environment_it_is_the_engine_alone(model: Any, tokenizer: Any) -> None:
    requests = [
        Request(i, (1, 4, 22 + i, 17, 23, 35, 5), 3, Sampling(max_tokens=8), seed=i) for i in range(4)
    ]
    silent: Conversation[Any] = Conversation(tokenizer, [], 5)
    ours = generate(TurnEngine(TransformersEngine(model, [EOS]), silent), requests)
    plain = generate(TransformersEngine(model, [EOS]), requests)
    assert [[replace(c, sampled=None) for c in response.completions] for response in ours] == [
        response.completions for response in plain
    ]


def test_max_tokens_bounds_the_whole_response(model: Any, tokenizer: Any) -> None:
    batch, engine, rewards = collected(model, tokenizer, steps=4, max_tokens=12)
    lengths = batch["tokens", "response_mask"].sum(-1)
    assert int(lengths.max()) <= 12
    assert all(len(request.prompt) + request.sampling.max_tokens <= 9 + 12 for request, _ in engine.drawn)
    cut = [judged.truncated for judged in rewards.seen]
    assert all(cut)  # four turns never fit: an answer that finds no room ends the response as truncated
    ends = batch["tokens", "loss_mask"].gather(1, lengths[:, None] - 1)
    assert ends.all()  # and no answer is left hanging at the end


def test_tokens_do_not_depend_on_what_else_is_generated(model: Any, tokenizer: Any) -> None:
    conversation: Conversation[Any] = Conversation(tokenizer, [ThinkAgain("?")], 3)
    requests = [
        Request(i, (1, 4, 22 + i, 17, 23, 35, 5), 3, Sampling(max_tokens=20), seed=i) for i in range(4)
    ]
    together = generate(TurnEngine(TransformersEngine(model, [EOS]), conversation), requests)
    for request, expected in zip(requests, together, strict=True):
        (alone,) = generate(TurnEngine(TransformersEngine(model, [EOS]), conversation), [request])
        assert [c.token_ids for c in alone.completions] == [c.token_ids for c in expected.completions]


def test_every_token_has_the_version_that_drew_it(model: Any, tokenizer: Any) -> None:
    inner = TransformersEngine(load_model(ModelConfig(name=str(QUICKSTART)), [torch.device("cpu")]), [EOS])
    engine = TurnEngine(inner, Conversation(tokenizer, [ThinkAgain("?")], 3))
    engine.submit(Request(0, (1, 4, 22, 17, 23, 35, 5), 2, Sampling(max_tokens=24), seed=0))
    finished: list[Response] = []
    version = 0
    while not finished:
        finished = engine.step(0.0)
        version += 1
        engine.load_weights(model.state_dict().items(), version)
    for completion in finished[0].completions:
        assert completion.sampled is not None
        drawn = [v for v, own in zip(completion.policy_versions, completion.sampled, strict=True) if own]
        assert len(set(drawn)) >= 3 and drawn == sorted(drawn)
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert len(completion.policy_versions) == len(completion.token_ids) == len(completion.log_probs)
    assert engine.in_flight == 0


def test_an_id_in_flight_is_refused(model: Any, tokenizer: Any) -> None:
    engine = TurnEngine(TransformersEngine(model, [EOS]), Conversation(tokenizer, [], 2))
    engine.submit(Request(7, (1, 4, 5), 1, Sampling(), seed=0))
    with pytest.raises(ValueError, match="request 7 is already in flight"):
        engine.submit(Request(7, (1, 4, 5), 1, Sampling(), seed=0))
