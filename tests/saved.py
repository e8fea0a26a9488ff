"""Checkpoints that tests make and look into. Not a test file."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config.schema.train import TrainConfig
from torchgrpo.run.checkpoint_retention import remove_others
from torchgrpo.training.checkpoint import LEARNER, begin_checkpoint, complete_checkpoint, packed
from torchgrpo.training.checkpoint_tensors import saved_tensors, write_tensors
from torchgrpo.training.trained_parameters import MODEL


def saved_model(path: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, by their names in the model."""
    tensors = saved_tensors(path / LEARNER, MODEL)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def save_checkpoint(path: Path, state: dict[str, Any], keep: int) -> None:
    """A checkpoint of a run whose learner is one tensor."""
    write_tensors(begin_checkpoint(path) / LEARNER, {"model.weight": torch.arange(10_000.0)})
    complete_checkpoint(path, packed(state))
    remove_others(path, TrainConfig(keep_checkpoints=keep))
