"""Pushes of merged adapters into an engine whose weights are too coarse for small steps of them."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import PeftModel

from config.models import LoraConfig
from envs.group import ALONE, Sampling
from rollout.engines.sampler import Request, generate
from rollout.engines.transformers_engine import TransformersEngine
from rollout.weights.canary import Canary, CanaryError
from rollout.weights.evidence import Answer, Drawn, DrawnRow, Scores, drawn_part
from rollout.weights.fixed_sequences import FixedSequences, canary_sequences
from rollout.weights.push import Weights
from rollout.weights.rounding import Rounding
from tests.policies import PolicyHere
from tests.rollout.conftest import EOS, MAX_LEN, VOCAB, tiny_llama
from training.adapters import add_lora
from training.published_weights import PolicyWeights, made, named_weights

SMALL, LARGE = 2e-5, 2e-2
"""Of an adapter's step: most of the first one rounds away in a bfloat16 weight, none of the second."""


class Run:
    """A learner whose adapter is merged for every push, an engine in bfloat16, and the canary between them."""

    def __init__(self, learner_dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        base = tiny_llama(tied=False).to(torch.bfloat16)
        self.policy = add_lora(copy.deepcopy(base).to(learner_dtype), LoraConfig(enabled=True, r=4))
        self.engine = TransformersEngine(base, (EOS,))
        self.learner = PolicyHere(self.policy, partial(named_weights, dtype=torch.bfloat16))
        fixed = FixedSequences(canary_sequences(VOCAB, MAX_LEN), self.engine, self.learner)
        self.canary = Canary(fixed, Rounding(self.learner, "bfloat16"), tied_head=None)
        self.weights = Weights(self.learner, self.engine, self.canary)

    def step(self, size: float) -> None:
        assert isinstance(self.policy, PeftModel)
        generator = torch.Generator().manual_seed(self.weights.version)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if "lora_B" in name:
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def run(request: pytest.FixtureRequest) -> Run:
    run = Run(request.param)
    run.weights.push()
    return run


@pytest.mark.parametrize("size", [SMALL, 1e-3, LARGE])
def test_a_push_that_arrived_passes_however_much_of_it_rounds_away(run: Run, size: float) -> None:
    for _ in range(3):
        run.step(size)
        run.weights.push()


def test_the_learner_answers_as_the_engine_that_has_its_merged_weights(run: Run) -> None:
    """Its scores for a canary are those of the rounded weights, not of the adapter beside the base."""
    run.step(1e-3)
    merged = tiny_llama(tied=False).to(torch.bfloat16)
    merged.load_state_dict(made(named_weights(run.policy, torch.bfloat16)))
    merged.to(next(run.policy.parameters()).dtype)
    expected = PolicyWeights(merged, named_weights).score(run.canary.fixed.token_ids)
    assert run.learner.score(run.canary.fixed.token_ids) == expected


def test_a_push_that_did_not_arrive_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.engine, "load", lambda weights, version: None)
    run.step(LARGE)
    with pytest.raises(CanaryError, match="Cause: unchanged"):
        run.weights.push()


@torch.no_grad()
def by_the_policy(run: Run, sequences: Sequence[Sequence[int]]) -> Scores:
    found = []
    for one in sequences:
        ids = torch.tensor([list(one)])
        scores = run.policy(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(scores.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def drawn(run: Run) -> Drawn:
    """By the engine, and what the policy that is trained, which nothing rounds, says of it."""
    requests = [
        Request(100 * run.weights.version + place, tuple(prompt), 8, Sampling(max_tokens=24), seed=place)
        for place, prompt in enumerate(canary_sequences(VOCAB, MAX_LEN, count=2, length=20))
    ]
    rows = []
    for request, response in zip(requests, generate(run.engine, requests), strict=True):
        for one in response.completions:
            (scores,) = by_the_policy(run, [[*request.prompt, *one.token_ids]])
            learner = scores[-len(one.token_ids) :]
            rows.append(DrawnRow(request.prompt, one.token_ids, one.log_probs, learner))
    gaps = [torch.tensor(row.engine) - torch.tensor(row.learner) for row in rows]
    return Drawn(torch.cat(gaps).abs(), rows[:4])


def prove(run: Run, before: Drawn | None = None) -> None:
    """By what is drawn, or what the engine says of that which it drew before."""

    def ask() -> Answer:
        assert before is not None
        sequences = [row.sequence for row in before.rows]
        return Answer(
            [replace(row, learner=None) for row in before.rows],
            run.engine.score(sequences),
            drawn_part(before.rows, by_the_policy(run, sequences)),
        )

    if before is None:
        run.weights.look_at(lambda version: {ALONE: drawn(run)})
    else:
        run.weights.look_at(lambda version: {}, ask)
    if not run.weights.proven:
        run.weights.prove()


@pytest.mark.parametrize("size", [SMALL, 1e-3, LARGE])
@pytest.mark.parametrize("doubts", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_a_push_that_arrived_is_proven_by_what_was_drawn(
    run: Run, size: float, doubts: bool, asked: bool
) -> None:
    """In doubt too, when rows from before the push are scored: what rounded away is no sign of a lost one."""
    run.canary.share = 0.0
    prove(run)
    for _ in range(4):
        before = drawn(run) if asked else None
        run.step(size)
        run.weights.push()
        if doubts:
            run.canary._usual[ALONE] = replace(run.canary._usual[ALONE], mean=0.0)
        prove(run, before)


@pytest.mark.parametrize("asked", [False, True])
def test_what_was_drawn_shows_a_push_that_did_not_arrive(
    run: Run, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.canary.share = 0.0
    prove(run)
    before = drawn(run) if asked else None
    monkeypatch.setattr(run.engine, "load", lambda weights, version: None)
    run.step(LARGE)
    run.weights.push()
    with pytest.raises(CanaryError, match="Cause: unchanged"):
        prove(run, before)


def test_a_push_without_the_adapter_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peft.tuners.lora.Linear.get_delta_weight", lambda *_: torch.zeros(()))
    base = made(named_weights(run.policy, torch.bfloat16))
    monkeypatch.undo()
    load = run.engine.load
    monkeypatch.setattr(run.engine, "load", lambda weights, version: load(base.items(), version))
    run.step(LARGE)
    with pytest.raises(CanaryError, match="Cause: unchanged"):
        run.weights.push()


def test_the_policy_is_itself_again_after_it_scored(run: Run) -> None:
    run.step(LARGE)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = run.policy(ids).logits
        tensors = {name: tensor.clone() for name, tensor in run.policy.state_dict().items()}
        run.learner.score(run.canary.fixed.token_ids)
        run.canary.rounding.closely(run.canary.fixed.token_ids)
        assert torch.equal(run.policy(ids).logits, before)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in run.policy.state_dict().items())
    assert all(
        parameter.requires_grad == ("lora_" in name) for name, parameter in run.policy.named_parameters()
    )
