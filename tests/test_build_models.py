"""Tests the placement of the reference model that the plan chooses.

No GPU is needed: loads and moves of models are recorded instead.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from config.schema.config import Config
from config.schema.models import ModelConfig
from config.schema.train import TrainConfig
from tests.tiny_models import tiny_llama
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan, ReferencePlan
from torchgrpo.training import learner_models
from torchgrpo.training.learner_models import make_models
from torchgrpo.training.reference_model import ReferenceModel

CPU = torch.device("cpu")
GPU = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture
def plan() -> Plan:
    config = Config(model=ModelConfig(name="models/quickstart"), train=TrainConfig(mixed_precision="bf16"))
    return make_plan(config, False, Machine(0, None, 16.0, 100.0, None), Path())


@pytest.mark.parametrize(
    ("placement", "train", "loaded_on", "expected_visits"),
    [("training GPU", (1,), GPU[1], []), ("host memory", (1,), CPU, [GPU[1]]), ("host memory", (), CPU, [])],
)
def test_the_reference_lives_where_the_plan_says(
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    train: tuple[int, ...],
    loaded_on: torch.device,
    expected_visits: list[torch.device],
) -> None:
    loaded: list[tuple[torch.device, torch.dtype | None]] = []
    visits: list[torch.device] = []

    class FakeHostWeights:
        def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
            visits.append(device)

        def on_device(self) -> None:
            raise AssertionError("nothing is scored here")

    def load(config: ModelConfig, place: torch.device, autocast: torch.dtype | None) -> torch.nn.Module:
        assert config.name == "models/quickstart"
        loaded.append((place, autocast))
        return tiny_llama()

    monkeypatch.setattr(learner_models, "load_frozen", load)
    monkeypatch.setattr(learner_models, "HostWeights", FakeHostWeights)
    reference_plan = ReferencePlan(placement, half_dtype=plan.reference.half_dtype)
    moved_plan = replace(plan, devices=replace(plan.devices, train=train), reference=reference_plan)
    policy_on = GPU[train[0]] if train else CPU
    monkeypatch.setattr(LlamaForCausalLM, "device", property(lambda model: policy_on))
    models = make_models(plan.config, tiny_llama(), moved_plan)
    policy, scorer, reference = models.policy, models.scorer, models.reference
    assert loaded == [(loaded_on, torch.bfloat16)]
    assert visits == expected_visits
    assert isinstance(reference, ReferenceModel)
    assert reference.scorer.model is not policy
    assert scorer.autocast_dtype == reference.scorer.autocast_dtype == torch.bfloat16
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert not any(parameter.requires_grad for parameter in reference.scorer.model.parameters())
