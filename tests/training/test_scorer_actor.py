"""Tests of loading a frozen model: bounds of its check, and error messages."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.schema.config import Config
from config.schema.errors import ConfigError
from tests.script_runner import ROOT, compose_run_config
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.training import scorer_actor
from torchgrpo.training.learner_models import load_base_model, make_models
from torchgrpo.training.scorer_actor import ScorerActor

QUICKSTART = ROOT / "torchgrpo" / "models" / "quickstart"


def make_config_and_plan(*overrides: str) -> tuple[Config, Plan]:
    config = compose_run_config("policy.kl_coef=0.1", "device=cpu", *overrides)
    return config, make_plan(config, False, Machine(0, None, 16.0, 100.0, None))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ScorerActor:
    """Returns a scorer actor in this process, without changes to its threads."""
    monkeypatch.setattr(scorer_actor, "prepare_process", lambda config, threads, device: None)
    return ScorerActor({})


def test_half_precision_weights_pass_the_forward_check(host: ScorerActor) -> None:
    own = ("ref_model.dtype=bfloat16", "train.mixed_precision=fp32", "ref_model.num_devices=1")
    assert host.build(*make_config_and_plan(*own)), "it packs"
    assert {parameter.dtype for parameter in host.scorer.model.parameters()} == {torch.bfloat16}


def test_an_error_names_the_key_of_the_reference_model(host: ScorerActor, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(QUICKSTART, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], math.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = rf"^ref_model\.name={folder}: lm_head\.weight holds values that are not finite"
    with pytest.raises(ConfigError, match=said):
        host.build(*make_config_and_plan(f"ref_model.name={folder}", "ref_model.num_devices=1"))
    config, plan = make_config_and_plan(f"ref_model.name={folder}")
    policy = load_base_model(config, plan)
    with pytest.raises(ConfigError, match=said):
        make_models(config, policy, plan)
    with pytest.raises(ConfigError, match=r"^model\.name="):
        host.build(*make_config_and_plan(f"model.name={folder}", "ref_model.num_devices=1"))
