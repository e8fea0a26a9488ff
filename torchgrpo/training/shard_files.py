"""Reads each rank's shards of a model straight from its safetensors files.

    every rank: names, shapes and bytes of the files ──equal on all ranks?──▶ its rows of each weight ──▶ its shard

Files whose tensors transformers renames, merges or converts are read by rank 0 alone (`training/sharding.py`), as are
files that a node lacks.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config.schema.models import ModelConfig
from torchgrpo.plan.model_shape import model_path
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.base_weights import weight_files
from torchgrpo.training.model_loading import (
    check_output_head,
    convert_loading_errors,
    make_buffers,
    make_skeleton,
    refuse_nonfinite_weights,
)
from torchgrpo.training.sharding import ShardedModel, local_shard

_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes of safetensors whose values are those of the weights; others belong to quantized models."""
_MAX_DIMENSIONS = 2
"""Dimensions of the weights that are read by rows; a library may merge experts into tensors of more."""
_SAMPLES = 64
"""Number of samples that are compared of each file, at equal distances from its start to its end."""
_SAMPLE_BYTES = 1 << 12
ADAPTER_NAME = "lora_"
"""Part of the names of adapters, which are in no file of the base model."""


def find_shard_files(config: ModelConfig) -> dict[str, Path] | None:
    """Returns the file of each weight, or None unless every rank can read its shards.

    Every rank calls this at once, and all get None alike. Ranks read where every node has the same files, with exactly
    the names and shapes of the model.
    """
    files = _matching_files(config)
    digest = 0 if files is None else _files_digest(files)
    extremes = torch.tensor([digest, -digest])
    dist.all_reduce(extremes, dist.ReduceOp.MIN)
    smallest, largest = int(extremes[0]), -int(extremes[1])
    return files if smallest == largest != 0 else None


def _matching_files(config: ModelConfig) -> dict[str, Path] | None:
    """Returns the file of each weight, or None where the model has other tensors."""
    with convert_loading_errors("the model", config.name):
        files, skeleton = weight_files(model_path(config.name)), make_skeleton(config)
        saved = dict(skeleton.named_parameters()) | _saved_buffers(skeleton)
        if files.keys() != saved.keys():
            return None
        for path, names in _names_by_file(files).items():
            with safe_open(path, "pt") as file:
                if not set(names) <= set(file.keys()):
                    return None
                for name in names:
                    rows, weight = file.get_slice(name), saved[name]
                    is_plain = rows.get_dtype() in _PLAIN_DTYPES and weight.ndim <= _MAX_DIMENSIONS
                    if not is_plain or list(weight.shape) != rows.get_shape():
                        return None
    return files


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a model that its files hold."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _names_by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    names: dict[Path, list[str]] = {}
    for name, path in files.items():
        names.setdefault(path, []).append(name)
    return names


def _files_digest(files: Mapping[str, Path]) -> int:
    """Returns a positive number for names, sizes and samples of the files."""
    digest = hashlib.sha256()
    for path, names in sorted(_names_by_file(files).items(), key=lambda item: item[0].name):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(repr((path.name, size, names)).encode())
            for number in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return 1 + int.from_bytes(digest.digest()[:7], "big")


def load_shards(root: ShardedModel, config: ModelConfig, files: Mapping[str, Path]) -> None:
    """Fills the shards and buffers of a model from its files, except for adapters.

    root: the sharded model; its tensors are on their device, with any values. files: from `find_shard_files`. A rank
    reads its rows of each weight, and at most one shard is in host memory beside the shards.

    Raises:
        ConfigError: on every rank alike, as by `load_model`.
    """
    model = causal_model(root.model)
    tensors = {_file_name(name): p.detach() for name, p in model.named_parameters() if ADAPTER_NAME not in name}
    buffers = {_file_name(name): buffer for name, buffer in model.named_buffers()}
    for name, value in make_buffers(config).items():
        buffers[name].copy_(value)
    tensors |= {name: buffers[name] for name in files.keys() & buffers.keys()}
    with convert_loading_errors("the model", config.name):
        for path, names in _names_by_file(files).items():
            with safe_open(path, "pt") as file:
                for name in names:
                    shard = local_shard(tensors[name])
                    if shard.numel():  # a rank has no rows of a weight with fewer rows than ranks
                        shard.copy_(file.get_slice(name)[_shard_rows(tensors[name])])
    _check_finite(config.name, {name: tensor for name, tensor in tensors.items() if name not in buffers})
    for name, parameter in model.named_parameters():
        if ADAPTER_NAME in name:  # fresh adapters add zero
            local_shard(parameter.detach()).zero_()
    mode = model.training
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        root(lambda: check_output_head(model.eval()))
    model.train(mode)


def _file_name(name: str) -> str:
    """Removes the part of a weight's name that an adapter adds."""
    return name.replace(".base_layer.", ".")


def _shard_rows(tensor: Tensor) -> slice:
    """Returns the rows of a weight that this rank holds.

    Ranks hold equal numbers of rows, the last ones fewer.
    """
    if not isinstance(tensor, DTensor):
        return slice(None)
    dimension = tensor.device_mesh.ndim - 1  # with copies of the parameters, the first dimension counts the copies
    rows = -(-tensor.shape[0] // tensor.device_mesh.size(dimension))
    start = rows * tensor.device_mesh.get_local_rank(dimension)
    return slice(start, start + tensor.to_local().shape[0])


def _check_finite(name: str, weights: Mapping[str, Tensor]) -> None:
    """Refuses weights that are not finite on any rank, on every rank alike. Raises ConfigError."""
    flags = torch.tensor([int(not local_shard(weight).isfinite().all()) for weight in weights.values()])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    nonfinite = [key for key, flag in zip(weights, flags.tolist(), strict=True) if flag]
    refuse_nonfinite_weights(name, next(iter(weights.values())).dtype, nonfinite)
