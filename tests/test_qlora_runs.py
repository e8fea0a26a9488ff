"""Runs with a 4-bit base model: training, resume, checkpoints and evaluation."""

import shutil
from pathlib import Path

import pytest
import torch

import grpo
from config.run_folder.checkpoints import checkpoint_path
from config.schema.errors import ConfigError
from tests.script_runner import compose_run_config, read_metrics, without_timings
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import saved_tensors

pytestmark = pytest.mark.long

pytest.importorskip("bitsandbytes", reason="pip install -e '.[qlora]' in the project's folder")

SETS = "eval.sets={held_out:{dataset:arithmetic,limit:20,temperature:0}}"
LORA = (
    *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64", "train.checkpoint_frequency=2"),
    *("train_model.lora.enabled=true", "optimizer.lr=3e-3", "policy.kl_coef=0.1", SETS),
)
QLORA = (*LORA, "train_model.lora.quantization=nf4")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains four iterations and returns the run's folder."""
    folder = tmp_path_factory.mktemp("trained")
    run_job(compose_run_config(*QLORA, "eval.frequency=2"), folder, grpo.train, LockstepRun)
    return folder


def metric_values(folder: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(folder) if key in row]


def test_engines_get_the_weights_and_the_base_is_the_reference(run_dir: Path) -> None:
    assert metric_values(run_dir, "kl/ref")[0] == pytest.approx(0.0, abs=1e-6)
    assert metric_values(run_dir, "kl/ref")[-1] > 1e-4
    assert max(metric_values(run_dir, "weight_check/max")) < 1e-3


def test_a_checkpoint_holds_only_the_adapters(run_dir: Path) -> None:
    tensors = saved_tensors(checkpoint_path(run_dir, 4) / LEARNER)
    assert tensors and all("lora_" in name for name in tensors)


def test_a_resumed_run_equals_an_uninterrupted_run(run_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run_dir, broken)
    shutil.rmtree(checkpoint_path(broken, 4))
    run_job(compose_run_config(*QLORA, "eval.frequency=2", "train.resume=auto"), broken, grpo.train, LockstepRun)
    trainings = [[row for row in read_metrics(folder) if "reward/mean" in row] for folder in (run_dir, broken)]
    assert without_timings(trainings[0]) == without_timings(trainings[1])
    ends = [saved_tensors(checkpoint_path(folder, 4) / LEARNER) for folder in (run_dir, broken)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_resume_with_another_base_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_model\.lora\.quantization"):
        run_job(compose_run_config(*LORA, "train.resume=auto"), run_dir, grpo.train, LockstepRun)


def test_an_evaluation_of_the_checkpoint_repeats_that_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    path = checkpoint_path(run_dir, 4)
    run_job(compose_run_config("run=eval", *QLORA, f"train.resume={path}"), tmp_path, grpo.train, LockstepRun)
    key = "eval/held_out/pass@1"
    assert metric_values(tmp_path, key) == metric_values(run_dir, key)[-1:]
    (ours,), theirs = (sorted((folder / "eval").rglob("*.jsonl")) for folder in (tmp_path, run_dir))
    assert ours.read_text() == theirs[-1].read_text()
