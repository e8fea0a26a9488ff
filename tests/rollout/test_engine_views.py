"""Two users of one engine, each with its own responses."""

import time
from typing import Any

import pytest
import torch
from envs.token_env import TokenEnv
from rollout.collector import EnginePolicy, Rollouts
from rollout.engine_views import EngineView, SharedEngine
from rollout.evaluator import FIRST_GROUP_ID, Evaluator

from envs.group import Sampling
from rollout.engines.sampler import Request, generate
from rollout.engines.transformers_engine import TransformersEngine
from tests.tiny import EOS, Judged, LengthReward, LetterTokenizer, numbered_examples, tiny_llama


def request(request_id: int, n: int = 2, max_tokens: int = 12) -> Request:
    return Request(request_id, (5, 6, 7), n, Sampling(max_tokens=max_tokens), seed=request_id)


def two_views() -> tuple[TransformersEngine, EngineView, EngineView]:
    engine = TransformersEngine(tiny_llama(), [EOS])
    shared = SharedEngine(engine)
    return engine, shared.view(), shared.view()


def test_each_view_gets_its_own_responses_and_the_tokens_it_would_have_got_alone() -> None:
    _, ours, theirs = two_views()
    for request_id in (1, 2):
        ours.submit(request(request_id))
        theirs.submit(request(request_id + 10, max_tokens=4))
    assert (ours.in_flight, theirs.in_flight) == (2, 2)
    collected = [response for _ in range(40) for response in ours.step(0.0)]
    assert sorted(response.request_id for response in collected) == [1, 2]
    assert (ours.in_flight, theirs.in_flight) == (0, 2)  # theirs have arrived and wait
    assert sorted(response.request_id for response in theirs.step(0.0)) == [11, 12]
    alone = generate(TransformersEngine(tiny_llama(), [EOS]), [request(1), request(2)])
    for response in collected:
        expected = next(other for other in alone if other.request_id == response.request_id)
        assert [c.token_ids for c in response.completions] == [c.token_ids for c in expected.completions]


def test_what_is_given_up_is_dropped() -> None:
    engine, ours, theirs = two_views()
    ours.submit(request(1))
    theirs.submit(request(2))
    theirs.give_up()
    collected = [response.request_id for _ in range(40) for response in ours.step(0.0)]
    assert collected == [1]
    assert engine.in_flight == theirs.in_flight == 0
    assert theirs.step(0.0) == []


def test_an_id_in_flight_is_refused() -> None:
    _, ours, theirs = two_views()
    ours.submit(request(1))
    with pytest.raises(ValueError, match="request 1 is in flight for another user"):
        theirs.submit(request(1))


def test_weights_and_versions_pass_through() -> None:
    engine, ours, _ = two_views()
    ours.load_weights(tiny_llama(seed=1).state_dict().items(), 7)
    assert engine.policy_version == ours.policy_version == 7
    assert ours.score([[5, 6, 7]]) == TransformersEngine(tiny_llama(seed=1), [EOS]).score([[5, 6, 7]])


def evaluator(
    engine: EngineView, count: int, in_flight: int, timeout: float = 60.0, rewards: Any = None
) -> Evaluator:
    examples = iter(numbered_examples(count))
    tokenizer: Any = LetterTokenizer()
    env = TokenEnv(lambda n: [next(examples) for _ in range(n)], tokenizer, rewards or LengthReward(), 3)
    policy = EnginePolicy(engine, Sampling(max_tokens=6), 3, seed=5, timeout=timeout)
    return Evaluator(Rollouts(env, policy), count, in_flight, timeout)


def test_an_evaluation_goes_through_every_problem_whatever_is_in_flight() -> None:
    scores = []
    for in_flight, busy in ((1, False), (4, True), (99, True)):
        _, training, ours = two_views()
        if busy:
            training.submit(request(1, n=4, max_tokens=40))
        asked = evaluator(ours, 7, in_flight)
        found = {}
        while not asked.done:
            assert ours.in_flight <= in_flight
            found |= dict(asked.advance(0.01))
        assert sorted(found) == list(range(7))
        assert all(int(group["group_id"].min()) == FIRST_GROUP_ID + index for index, group in found.items())
        scores.append(torch.stack([found[index]["next", "reward"][:, 0] for index in range(7)]))
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


class Withheld(LengthReward):
    """Gives no verdict before it is told to."""

    def __init__(self) -> None:
        self.tickets: list[Judged] = []

    def submit(self, completions: Any, examples: Any) -> Judged:
        self.tickets.append(Judged(self.score(completions, examples), missing=len(completions)))
        return self.tickets[-1]

    def release(self) -> None:
        for ticket in self.tickets:
            ticket.missing = 0


def test_the_engines_go_on_while_graders_are_slow() -> None:
    _, _, ours = two_views()
    rewards = Withheld()
    asked = evaluator(ours, 7, in_flight=2, timeout=5.0, rewards=rewards)
    deadline = time.monotonic() + 60.0
    while len(rewards.tickets) < 7 and time.monotonic() < deadline:
        assert asked.advance(0.1) == []
    assert ours.in_flight == 0, "all have been answered, though none is judged"
    assert not asked.done
    rewards.release()
    assert sorted(index for index, _ in asked.advance(60.0)) == list(range(7))
    assert asked.done


def test_a_silent_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, ours = two_views()
    monkeypatch.setattr(engine, "step", lambda timeout: [])
    with pytest.raises(TimeoutError, match=r"the evaluation waited 0 s .* any of 2 groups"):
        evaluator(ours, 5, 2, timeout=0.05).advance(5.0)
