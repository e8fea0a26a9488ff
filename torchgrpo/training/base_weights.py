"""Readers of single weights of `model.name`, from its safetensors files or the loaded model.

model.safetensors, or the files of its index ──stream_weights──▶ one tensor by its name, mapped from the file
every other kind of file ──load_weights──▶ one tensor by its name, from the whole model in memory

A checkpoint of an adapter does not hold these weights.
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

WeightReader = Callable[[str], Tensor]
"""Function from the name of a weight, as a layer of the model has it, to the weight in `model.dtype`."""


def stream_weights(model: ModelConfig, names: Iterable[str]) -> WeightReader | None:
    """Returns a reader that reads single tensors from the safetensors files of a model.

    None where the files do not hold all `names` under exactly these names.
    """
    files = weight_files(model_path(model.name))
    if not set(names) <= files.keys():
        return None

    def read(name: str) -> Tensor:
        with safe_open(files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(getattr(torch, model.dtype)) if tensor.is_floating_point() else tensor

    return read


def load_weights(model: ModelConfig) -> WeightReader:
    """Loads the whole model into host memory and returns a reader of its weights.

    To be called in the main thread, for loading changes torch's global defaults meanwhile.
    """
    weights = load_model(model, torch.device("cpu")).state_dict()
    return weights.__getitem__


def weight_files(path: str) -> dict[str, Path]:
    """Returns the safetensors file of every tensor, by tensor name; empty without safetensors files."""
    single = _find_file(path, "model.safetensors")
    if single is not None:  # transformers prefers this file to an index
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = _find_file(path, "model.safetensors.index.json")
    if index is None:
        return {}
    weights: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {name: _find_file(path, name) for name in set(weights.values())}
    paths = {tensor: files[name] for tensor, name in weights.items()}
    return {tensor: file for tensor, file in paths.items() if file is not None}


def _find_file(path: str, name: str) -> Path | None:
    """Returns a file of a local model folder or of the hub's cache, if any."""
    file = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if file is None else Path(file)
