"""The weights of `model.name`, one at a time: what a checkpoint of an adapter does not hold.

model.safetensors, or the files of its index ──streamed──▶ a tensor by its name, mapped from the file
every other kind of file ──loaded──▶ the same, from the whole model in memory
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from config.schema.models import ModelConfig
from torchgrpo.plan.model_shape import model_path
from torchgrpo.training.model_loading import load_model

Base = Callable[[str], Tensor]
"""From a name, as a layer of the model has it, to the weight, in `model.dtype`."""


def streamed(model: ModelConfig, names: Iterable[str]) -> Base | None:
    """Reads from the files what is asked for. None where they do not hold all `names` under these very names."""
    files = weight_files(model_path(model.name))
    if not set(names) <= files.keys():
        return None

    def read(name: str) -> Tensor:
        with safe_open(files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(getattr(torch, model.dtype)) if tensor.is_floating_point() else tensor

    return read


def loaded(model: ModelConfig) -> Base:
    """Takes as much of the host's memory as the model. Not for a thread: loading changes torch's defaults meanwhile."""
    weights = load_model(model, torch.device("cpu")).state_dict()
    return weights.__getitem__


def weight_files(path: str) -> dict[str, Path]:
    """The safetensors file of every tensor, by its name; empty where there are none."""
    single = _file(path, "model.safetensors")
    if single is not None:  # which the library takes, whatever an index says
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = _file(path, "model.safetensors.index.json")
    if index is None:
        return {}
    weights: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {name: _file(path, name) for name in set(weights.values())}
    found = {tensor: files[name] for tensor, name in weights.items()}
    return {tensor: file for tensor, file in found.items() if file is not None}


def _file(path: str, name: str) -> Path | None:
    """Of a local folder, or of a hub name's cache."""
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)
