"""Weight transport `weight_folder`: files of the last push, for servers that read the same disk."""

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from config.run_folder.atomic_files import atomic_folder
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.weight_update import PublishedTensor, WeightUpdate
from torchgrpo.training.safetensors_writer import TensorGroup, write_safetensors

FOLDER = "weights"
"""Folder of the pushes in the run's folder, where `inference_model.weight_folder` is unset."""


def make_transport(plan: Plan) -> WeightTransport:
    return WeightTransport(make_weight_folder(plan))


def make_weight_folder(plan: Plan) -> "WeightFolder":
    configured = plan.config.inference_model.weight_folder
    return WeightFolder(plan.folder / FOLDER if configured is None else Path(configured))


@dataclass(frozen=True)
class WeightFiles:
    """Handle of the files of one push. path: their folder, absolute."""

    path: Path

    def open(self) -> WeightUpdate:
        from safetensors.torch import load_file

        files = sorted(self.path.glob("*.safetensors"))
        return WeightUpdate.from_pairs(pair for file in files for pair in load_file(file).items())


class WeightFolder:
    """Folder that holds the safetensors files of the last push.

    Every push has a folder of its own, which appears when it is complete. Two runs may share `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._is_new = not self._folder.exists()
        self._name = secrets.token_hex(6)
        self._number = 0
        self._push_folders: list[Path] = []

    def write(self, weights: WeightUpdate) -> WeightFiles:
        """Writes the files of a push; `remove_older` removes those of the push before."""
        self._number += 1
        path = self._folder / f"{self._name}-{self._number:06d}"
        with atomic_folder(path) as temporary:
            write_safetensors(temporary, [_tensor_group(weights, tensor) for tensor in weights.tensors])
        self._push_folders.append(path)
        return WeightFiles(path)

    def remove_older(self) -> None:
        """Removes the files of all pushes but the last."""
        while len(self._push_folders) > 1:
            shutil.rmtree(self._push_folders.pop(0), ignore_errors=True)

    def close(self) -> None:
        while self._push_folders:
            shutil.rmtree(self._push_folders.pop(), ignore_errors=True)
        if self._is_new:
            with suppress(OSError):  # another run uses the folder, or no push came
                self._folder.rmdir()


def _tensor_group(weights: WeightUpdate, tensor: PublishedTensor) -> TensorGroup:
    description = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return TensorGroup({tensor.name: description}, partial(_make_on_host, weights, tensor))


def _make_on_host(weights: WeightUpdate, tensor: PublishedTensor) -> dict[str, torch.Tensor]:
    return {tensor.name: weights.make(tensor).cpu()}
