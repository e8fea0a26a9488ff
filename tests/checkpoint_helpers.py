"""Writes and reads checkpoints for tests. Not a test file."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config.schema.train import TrainConfig
from torchgrpo.run.checkpoint_retention import remove_old_checkpoints
from torchgrpo.training.checkpoint import LEARNER, begin_checkpoint, complete_checkpoint, serialize_run_state
from torchgrpo.training.checkpoint_tensors import saved_tensors, write_tensors
from torchgrpo.training.learner_state import OPTIMIZER_PREFIX
from torchgrpo.training.master_weights import join
from torchgrpo.training.trained_parameters import MODEL_PREFIX


def saved_model(path: Path) -> dict[str, Tensor]:
    """Returns the model's tensors in a checkpoint, by their names in the model."""
    tensors = saved_tensors(path / LEARNER, MODEL_PREFIX)
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}


def saved_master_weights(path: Path) -> dict[str, Tensor]:
    """Returns the model's tensors in a checkpoint, bfloat16 with the optimizer's remainders."""
    states, weights = saved_tensors(path / LEARNER, OPTIMIZER_PREFIX), saved_model(path)
    for name, weight in weights.items():
        remainder = states.get(f"{OPTIMIZER_PREFIX}{name}.remainder")
        if remainder is not None:
            weights[name] = join([weight], [remainder])[: weight.numel()].view(weight.shape)
    return weights


def save_checkpoint(path: Path, state: dict[str, Any], keep: int) -> None:
    """Writes the checkpoint of a run whose learner is one tensor."""
    write_tensors(begin_checkpoint(path) / LEARNER, {"model.weight": torch.arange(10_000.0)})
    complete_checkpoint(path, serialize_run_state(state))
    remove_old_checkpoints(path, TrainConfig(keep_checkpoints=keep))
