"""Where the reference lives, by the plan. No GPU is here: loading and moving are recorded instead."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from config.schema.config import Config
from config.schema.models import ModelConfig
from config.schema.train import TrainConfig
from tests.tiny import tiny_llama
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan, ReferencePlan
from torchgrpo.training import learner_models
from torchgrpo.training.learner_models import make_models
from torchgrpo.training.reference import Reference

CPU = torch.device("cpu")
GPU = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture
def plan() -> Plan:
    config = Config(model=ModelConfig(name="models/quickstart"), train=TrainConfig(mixed_precision="bf16"))
    return make_plan(config, False, Machine(0, None, 16.0, 100.0, None), Path())


@pytest.mark.parametrize(
    ("home", "train", "loaded_on", "visits"),
    [("training GPU", (1,), GPU[1], []), ("host memory", (1,), CPU, [GPU[1]]), ("host memory", (), CPU, [])],
)
def test_the_reference_lives_where_the_plan_says(
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    home: str,
    train: tuple[int, ...],
    loaded_on: torch.device,
    visits: list[torch.device],
) -> None:
    loaded: list[tuple[torch.device, torch.dtype | None]] = []
    visited: list[torch.device] = []

    class Visitor:
        def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
            visited.append(device)

        def visit(self) -> None:
            raise AssertionError("nothing is scored here")

    def load(config: ModelConfig, place: torch.device, autocast: torch.dtype | None) -> torch.nn.Module:
        assert config.name == "models/quickstart"
        loaded.append((place, autocast))
        return tiny_llama()

    monkeypatch.setattr(learner_models, "load_frozen", load)
    monkeypatch.setattr(learner_models, "HostMemory", Visitor)
    there = replace(plan, devices=replace(plan.devices, train=train), reference=ReferencePlan(home))
    policy_on = GPU[train[0]] if train else CPU
    monkeypatch.setattr(LlamaForCausalLM, "device", property(lambda model: policy_on))
    models = make_models(plan.config, tiny_llama(), there)
    policy, scorer, reference = models.policy, models.scorer, models.reference
    assert loaded == [(loaded_on, torch.bfloat16)]
    assert visited == visits
    assert isinstance(reference, Reference)
    assert reference.scorer.model is not policy
    assert scorer.autocast_dtype == reference.scorer.autocast_dtype == torch.bfloat16
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert not any(parameter.requires_grad for parameter in reference.scorer.model.parameters())
