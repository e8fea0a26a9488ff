"""Tests of merged adapter pushes into an engine whose dtype rounds small changes away."""

import copy
from functools import partial

import pytest
import torch
from peft import PeftModel

from config.schema.models import LoraConfig
from tests.local_policy import LocalPolicy, check_plan
from tests.rollout.conftest import EOS, tiny_llama
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.weight_check import WeightCheck, WeightMismatch
from torchgrpo.rollout.weights.weight_pusher import WeightPusher
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.published_weights import make_tensors, named_weights

SMALL, LARGE = 2e-5, 2e-2
"""Of an adapter's step: most of the first one rounds away in a bfloat16 weight, none of the second."""


class PushRun:
    """Learner with merged adapters, an engine in bfloat16, and the weight check between them."""

    def __init__(self, learner_dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        base = tiny_llama(tied=False).to(torch.bfloat16)
        self.policy = add_lora(copy.deepcopy(base).to(learner_dtype), LoraConfig(enabled=True, r=4))
        self.engine = TransformersEngine(base, (EOS,))
        self.learner = LocalPolicy(self.policy, partial(named_weights, dtype=torch.bfloat16))
        check = WeightCheck(check_plan("bfloat16"), self.engine, self.learner)
        self.weights = WeightPusher(self.learner, self.engine, check)

    def step(self, size: float) -> None:
        assert isinstance(self.policy, PeftModel)
        generator = torch.Generator().manual_seed(self.weights.version)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if "lora_B" in name:
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    def push(self) -> None:
        self.weights.push()
        assert self.weights.check_push()


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def run(request: pytest.FixtureRequest) -> PushRun:
    run = PushRun(request.param)
    run.push()
    return run


@pytest.mark.parametrize("size", [SMALL, 1e-4, 1e-3, LARGE])
def test_a_push_that_arrived_passes_however_much_of_it_rounds_away(run: PushRun, size: float) -> None:
    for _ in range(5):
        run.step(size)
        run.push()


def test_a_push_that_did_not_arrive_is_found(run: PushRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.engine, "load", lambda weights, version: None)
    run.step(LARGE)
    with pytest.raises(WeightMismatch, match="Cause: old weights"):
        run.push()


def test_a_push_without_the_adapter_is_found(run: PushRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peft.tuners.lora.Linear.get_delta_weight", lambda *_: torch.zeros(()))
    base = make_tensors(named_weights(run.policy, torch.bfloat16))
    monkeypatch.undo()
    load = run.engine.load
    monkeypatch.setattr(run.engine, "load", lambda weights, version: load(base.items(), version))
    run.step(LARGE)
    with pytest.raises(WeightMismatch, match="Cause: old weights"):
        run.push()


def test_scoring_restores_the_policy(run: PushRun) -> None:
    run.step(LARGE)
    ids = torch.arange(3, 40)[None]
    modes = [module.training for module in run.policy.modules()]
    with torch.no_grad():
        before = run.policy(ids).logits
        run.learner.score([[3, 4, 5, 6]])
        assert torch.equal(run.policy(ids).logits, before)
    assert modes == [module.training for module in run.policy.modules()]
