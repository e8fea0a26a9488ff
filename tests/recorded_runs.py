"""Small runs with all that a run leaves in its folder. Not a test file."""

from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
from omegaconf import OmegaConf

import grpo
from config.run_folder.checkpoints import checkpoint_path
from tests.scripts import SCHEDULE_OF, configured, rows, without_clocks
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
    """A run of the quickstart's model, in this process; its folder."""
    config = configured(*SMALL, *overrides)
    folder.mkdir(exist_ok=True)

    def begun() -> None:
        (folder / ".hydra").mkdir(exist_ok=True)
        settings = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
        (folder / ".hydra" / "config.yaml").write_text(settings)

    run_job(config, folder, script.train, SCHEDULE_OF[script], begun)
    return folder


def assert_same_run(one: Path, other: Path, iteration: int) -> None:
    """Two runs have the same rows without clocks, and the same tensors in a checkpoint."""
    assert without_clocks(rows(one)) == without_clocks(rows(other))
    ours, theirs = (saved_tensors(checkpoint_path(folder, iteration) / LEARNER) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
