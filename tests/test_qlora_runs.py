"""Whole runs on a base in 4 bits: they learn, go on where they were, and what is evaluated is what they made."""

import shutil
from pathlib import Path

import pytest
import torch

import grpo
from config.run_folder.checkpoints import checkpoint_path
from config.schema.errors import ConfigError
from tests.scripts import configured, rows, without_clocks
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import saved_tensors

pytestmark = pytest.mark.long

pytest.importorskip("bitsandbytes", reason="pip install -e '.[qlora]' in the project's folder")

SETS = "eval.sets={held_out:{dataset:arithmetic,limit:20,temperature:0}}"
GIVEN = (
    *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64", "train.checkpoint_frequency=2"),
    *("train_model.lora.enabled=true", "optimizer.lr=3e-3", "policy.kl_coef=0.1", SETS),
)
QLORA = (*GIVEN, "train_model.lora.quantization=nf4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations."""
    folder = tmp_path_factory.mktemp("trained")
    run_job(configured(*QLORA, "eval.frequency=2"), folder, grpo.train, Lockstep)
    return folder


def row(folder: Path, key: str) -> list[float]:
    return [one[key] for one in rows(folder) if key in one]


def test_pushes_arrive_and_the_base_is_the_reference(trained: Path) -> None:
    assert row(trained, "kl/ref")[0] == pytest.approx(0.0, abs=1e-6)
    assert row(trained, "kl/ref")[-1] > 1e-4
    assert max(row(trained, "weight_check/largest")) < 1e-3


def test_a_checkpoint_holds_the_adapters_alone(trained: Path) -> None:
    tensors = saved_tensors(checkpoint_path(trained, 4) / LEARNER)
    assert tensors and all("lora_" in name for name in tensors)


def test_a_resumed_run_is_the_same_run(trained: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    shutil.rmtree(checkpoint_path(broken, 4))
    run_job(configured(*QLORA, "eval.frequency=2", "train.resume=auto"), broken, grpo.train, Lockstep)
    trainings = [[one for one in rows(folder) if "reward/mean" in one] for folder in (trained, broken)]
    assert without_clocks(trainings[0]) == without_clocks(trainings[1])
    ends = [saved_tensors(checkpoint_path(folder, 4) / LEARNER) for folder in (trained, broken)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_run_does_not_go_on_with_another_base(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_model\.lora\.quantization"):
        run_job(configured(*GIVEN, "train.resume=auto"), trained, grpo.train, Lockstep)


def test_what_is_evaluated_is_what_the_run_evaluated(trained: Path, tmp_path: Path) -> None:
    path = checkpoint_path(trained, 4)
    run_job(configured("run=eval", *QLORA, f"train.resume={path}"), tmp_path, grpo.train, Lockstep)
    key = "eval/held_out/pass@1"
    assert row(tmp_path, key) == row(trained, key)[-1:]
    (ours,), theirs = (sorted((folder / "eval").rglob("*.jsonl")) for folder in (tmp_path, trained))
    assert ours.read_text() == theirs[-1].read_text()
