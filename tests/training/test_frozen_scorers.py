"""Loading a frozen model: bounds of its own, and messages that name it."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.schema.config import Config
from config.schema.errors import ConfigError
from tests.scripts import ROOT, configured
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.training import scorer_actor
from torchgrpo.training.learner_models import load_base, make_models
from torchgrpo.training.scorer_actor import ScorerActor

QUICKSTART = ROOT / "torchgrpo" / "models" / "quickstart"


def planned(*overrides: str) -> tuple[Config, Plan]:
    config = configured("policy.kl_coef=0.1", "device=cpu", *overrides)
    return config, make_plan(config, False, Machine(0, None, 16.0, 100.0, None))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ScorerActor:
    """A scorer in this process, whose threads stay as they are."""
    monkeypatch.setattr(scorer_actor, "prepare_process", lambda config, threads, device: None)
    return ScorerActor({})


def test_half_precision_of_its_own_is_no_fault_of_its_packing(host: ScorerActor) -> None:
    own = ("ref_model.dtype=bfloat16", "train.mixed_precision=fp32", "ref_model.num_devices=1")
    assert host.build(*planned(*own)), "it packs"
    assert {parameter.dtype for parameter in host.scorer.model.parameters()} == {torch.bfloat16}


def test_files_of_another_model_are_blamed_by_its_key(host: ScorerActor, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(QUICKSTART, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], math.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = rf"^ref_model\.name={folder}: lm_head\.weight holds values that are not finite"
    with pytest.raises(ConfigError, match=said):
        host.build(*planned(f"ref_model.name={folder}", "ref_model.num_devices=1"))
    config, plan = planned(f"ref_model.name={folder}")
    policy = load_base(config, plan)
    with pytest.raises(ConfigError, match=said):
        make_models(config, policy, plan)
    with pytest.raises(ConfigError, match=r"^model\.name="):
        host.build(*planned(f"model.name={folder}", "ref_model.num_devices=1"))
