"""Small training runs with complete run folders, for tests."""

from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
from omegaconf import OmegaConf

import grpo
from config.run_folder.checkpoints import checkpoint_path
from tests.script_runner import SCHEDULE_CLASSES, compose_run_config, read_metrics, without_timings
from torchgrpo.run.job import run_job
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import saved_tensors

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64", "optimizer.lr=3e-3")
STEPS = ("train.epochs=2", "train.optim_batch_size=8")
"""Four optimizer steps in an iteration."""
LORA = ("train_model.lora.enabled=true", "train_model.lora.r=4")
SETS = "eval.sets={held_out:{dataset:arithmetic,n:4,limit:20}}"
EVERY_SECOND = (SETS, "eval.frequency=2", "train.checkpoint_frequency=2")
ADAPTER = (*STEPS, *LORA, "train_model.lora.dropout=0.1", *EVERY_SECOND)
"""Settings of the `lora_run` beside `SMALL`; the `lockstep_run` has `EVERY_SECOND`."""


def recorded_run(folder: Path, *overrides: str, script: ModuleType = grpo) -> Path:
    """Trains the quickstart model in this process, and returns the run's folder."""
    config = compose_run_config(*SMALL, *overrides)
    folder.mkdir(exist_ok=True)

    def write_config() -> None:
        (folder / ".hydra").mkdir(exist_ok=True)
        settings = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
        (folder / ".hydra" / "config.yaml").write_text(settings)

    run_job(config, folder, script.train, SCHEDULE_CLASSES[script], write_config)
    return folder


def assert_same_run(first: Path, second: Path, iteration: int) -> None:
    """Checks that two runs have equal metrics without clocks and equal checkpoint tensors."""
    assert without_timings(read_metrics(first)) == without_timings(read_metrics(second))
    ours, theirs = (saved_tensors(checkpoint_path(folder, iteration) / LEARNER) for folder in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
