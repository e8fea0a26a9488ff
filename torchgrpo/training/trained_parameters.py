"""Lists a policy's trained tensors, and checks that a checkpoint belongs to the same model.

Without LoRA the trained part is every weight, with LoRA the adapter alone; the rest comes from `model.name`.
A digest of the base model goes with it: an adapter is only of use on the weights that it was trained on, and
the reference model of a resumed run must be the model that the run started from.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from config.schema.errors import ConfigError
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.quantization import state_dict_without_scales
from torchgrpo.training.sharding import full_tensor

MODEL_PREFIX = "model."
"""Prefix of the names of the model's tensors in a checkpoint."""
MODEL_KEYS = {"base", "architecture"}
"""Keys of `describe_model`."""
_DIGEST_SAMPLES = 64
_IGNORED_SETTINGS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Settings of a model's config that do not change what the model computes."""


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the live tensors of the policy that a checkpoint holds.

    These are the trained parameters, each once, and the persistent buffers.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in state_dict_without_scales(model).items() if name not in parameters}
    return {name: one for name, one in model.named_parameters() if one.requires_grad} | buffers


def describe_model(model: nn.Module, base: str) -> dict[str, Any]:
    """Returns the entries of a checkpoint that identify the policy's base weights and architecture.

    base: `base_digest` of the model before training.
    """
    return {"base": base, "architecture": _architecture(model)}


def check_same_model(
    model: nn.Module, base: str, saved_model: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> None:
    """Checks that the tensors of a checkpoint belong to a model as `model.name` gives it.

    base: `base_digest` of that model. saved_model: `describe_model` of the saved model. shapes: shapes of the
    saved tensors by their names in the checkpoint.

    Raises:
        ConfigError: the tensors belong to another model; the message names the first difference.
    """
    saved_shapes = {
        name.removeprefix(MODEL_PREFIX): shape for name, shape in shapes.items() if name.startswith(MODEL_PREFIX)
    }
    model_shapes = {name: list(tensor.shape) for name, tensor in trained_tensors(model).items()}
    _check_equal("setting", saved_model["architecture"], _architecture(model))
    _check_equal("shape of", saved_shapes, model_shapes)
    if saved_model["base"] != base:
        raise ConfigError(
            "the run of the checkpoint started from other weights than those of model.name; name the "
            "model that it trained"
        )


def _check_equal(label: str, saved_values: Mapping[str, Any], own_values: Mapping[str, Any]) -> None:
    """Raises ConfigError with the first key whose values differ."""
    different = [key for key in {**saved_values, **own_values} if saved_values.get(key) != own_values.get(key)]
    if different:
        key = different[0]
        raise ConfigError(
            f"the checkpoint has another model than model.name and train_model.lora: {label} {key} is "
            f"{saved_values.get(key)} in the checkpoint and {own_values.get(key)} here; name the model that "
            "its run trained"
        )


def base_digest(model: nn.Module) -> str:
    """Returns a digest of the untrained base model: names, shapes and some values."""
    return digest_tensors((name, full_tensor(one.detach())) for name, one in base_parameters(model).items())


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the digest of tensors by name, as `base_digest`; one tensor exists at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        flat = tensor.flatten()
        samples = flat[:: max(1, flat.numel() // _DIGEST_SAMPLES)][:_DIGEST_SAMPLES].float()
        digest.update(f"{name} {list(tensor.shape)} {samples.tolist()}".encode())
    return digest.hexdigest()


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of `model.name` on which a run depends.

    These are the frozen parameters under an adapter, otherwise all parameters.
    """
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
    return frozen or dict(model.named_parameters())


def _architecture(model: nn.Module) -> dict[str, Any]:
    """Returns the settings of a model's config.json that change what the model computes."""
    settings = causal_model(model).config.to_diff_dict()
    return {key: _to_plain_types(value) for key, value in settings.items() if key not in _IGNORED_SETTINGS}


def _to_plain_types(value: Any) -> Any:
    """Converts a value to types that a checkpoint may hold."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain_types(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_types(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
