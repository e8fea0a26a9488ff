"""What training changes of a model, as a checkpoint holds it, and whether it fits the model that is here.

Without LoRA that is every weight, with LoRA the adapter alone; the rest comes from `model.name`. A digest of what the
run began from goes with it: an adapter is of use only on the weights that it was trained on, and the reference model
of a resumed run must be the one that it had.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from config.schema.errors import ConfigError
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.quantization import state_without_scales
from torchgrpo.training.sharding import whole

MODEL = "model."
"""Begins the names of the model's tensors in a checkpoint."""
KEYS = {"base", "architecture"}
_SAMPLES = 64
_OF_THE_FILES = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""What a model's config says that is not its function."""


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the policy, live: trained parameters, each once, and the buffers that are saved."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in state_without_scales(model).items() if name not in parameters}
    return {name: one for name, one in model.named_parameters() if one.requires_grad} | buffers


def described(model: nn.Module, base: str) -> dict[str, Any]:
    """The policy in a checkpoint beside its tensors. base: its `base_digest` before it was trained."""
    return {"base": base, "architecture": _architecture(model)}


def check_same_model(
    model: nn.Module, base: str, saved: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> None:
    """That the tensors of a checkpoint belong into a model as `model.name` gives it.

    base: `base_digest` of that model. saved: what `described` said. shapes: of the tensors, by their names there.
    Raises:
        ConfigError: they are of another model; the message names the first difference.
    """
    there = {name.removeprefix(MODEL): shape for name, shape in shapes.items() if name.startswith(MODEL)}
    here = {name: list(tensor.shape) for name, tensor in trained_tensors(model).items()}
    _check_equal("setting", saved["architecture"], _architecture(model))
    _check_equal("shape of", there, here)
    if saved["base"] != base:
        raise ConfigError(
            "its run began from other weights than those that model.name has now; give the model that it trained"
        )


def _check_equal(what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if different:
        key = different[0]
        raise ConfigError(
            f"it holds another model than model.name and train_model.lora say: {what} {key} is "
            f"{there.get(key)} in the checkpoint and {here.get(key)} here; give the model that its run trained"
        )


def base_digest(model: nn.Module) -> str:
    """Of names, shapes and some values of what `model.name` brought, before anything is trained."""
    return digest_of((name, whole(one.detach())) for name, one in brought(model).items())


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """As `base_digest`, of tensors by name, of which one exists at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        flat = tensor.flatten()
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float()
        digest.update(f"{name} {list(tensor.shape)} {some.tolist()}".encode())
    return digest.hexdigest()


def brought(model: nn.Module) -> dict[str, nn.Parameter]:
    """What `model.name` brought, as far as a run depends on it: the base under an adapter, else every parameter."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
    return frozen or dict(model.named_parameters())


def _architecture(model: nn.Module) -> dict[str, Any]:
    said = causal_model(model).config.to_diff_dict()
    return {key: _plain(value) for key, value in said.items() if key not in _OF_THE_FILES}


def _plain(value: Any) -> Any:
    """In types that a checkpoint may hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
