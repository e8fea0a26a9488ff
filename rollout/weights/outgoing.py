"""What a push carries: names and shapes are known at once, every tensor is made only as it leaves.

    parts of a policy ──merge the adapter, cast──▶ one tensor ──▶ transport ──▶ the next tensor ...

So a push of a LoRA policy never holds a second copy of the model, and each transport sends the engines' dtype.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from config.errors import ConfigError

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """One tensor of a push.

    source: as it lies in the learner. layer: peft's, whose active adapters are added to it as it leaves; None
    where it leaves as it is. dtype: that it leaves in.
    """

    name: str
    source: torch.Tensor
    layer: Any
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """What the engines get: weight + scale * B A, rounded once."""
        with torch.no_grad():
            tensor = self.source.detach()
            for adapter in () if self.layer is None else self.layer.active_adapters:
                tensor = tensor + self.layer.get_delta_weight(adapter)
            return tensor.to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.source.numel() * self.dtype.itemsize

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for the names of one tied tensor. Sources outlive a push, so their addresses are their own."""
        source = self.source
        return source.data_ptr(), source.dtype, source.shape, source.stride(), self.dtype, id(self.layer)


class Outgoing:
    """The (name, tensor) pairs of one push, as often as somebody iterates over them."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    @classmethod
    def of(cls, weights: NamedTensors) -> "Outgoing":
        """Tensors that leave as they are."""
        if isinstance(weights, Outgoing):
            return weights
        return cls([Part(name, tensor, None, tensor.dtype) for name, tensor in weights])

    def cast(self, dtype: torch.dtype) -> "Outgoing":
        """The same, with every floating-point tensor rounded to `dtype` as it leaves."""
        return Outgoing(
            [replace(part, dtype=dtype) if part.dtype.is_floating_point else part for part in self.parts]
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part in self.parts:
            yield part.name, part.make()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(part.name for part in self.parts)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the tensors lie, in their order: the learner's first device first."""
        return tuple(dict.fromkeys(part.source.device for part in self.parts))


def named_weights(model: Any) -> Outgoing:
    """Every tensor of a policy under its Hugging Face name: tied heads under both names, LoRA merged in.

    The training weights are not touched. Raises ConfigError for LoRA variants without a plain merge (DoRA).
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return Outgoing.of(model.state_dict().items())
    modules = dict(model.get_base_model().named_modules())
    parts = []
    for name, tensor in model.get_base_model().state_dict().items():
        if "lora_" in name or ".original_module." in name:
            continue
        owner = modules[name.split(".base_layer.")[0]] if ".base_layer." in name else None
        layer = _mergeable(owner) if owner is not None and tensor.ndim > 1 else None
        parts.append(Part(_plain_name(name), tensor, layer, tensor.dtype))
    return Outgoing(parts)


def adapter_weights(model: Any) -> Outgoing:
    """The LoRA tensors of a peft model alone, under peft's names (`inference_model.lora=adapter`)."""
    from peft.utils import get_peft_model_state_dict

    return Outgoing.of(get_peft_model_state_dict(model).items())


def _plain_name(name: str) -> str:
    """The Hugging Face name of a tensor inside peft's wrappers."""
    parts = name.replace(".base_layer.", ".").split(".")
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        parts = parts[:at] + parts[at + 2 :]
    return ".".join(parts)


def _mergeable(layer: Any) -> Any:
    if any(layer.use_dora.get(adapter, False) for adapter in layer.active_adapters):
        raise ConfigError("a DoRA adapter cannot be pushed merged: train_model.lora supports plain LoRA")
    return layer
