"""The policy as others name it: the tensors that it publishes under their Hugging Face names, adapters merged in.

policy ──named_weights──▶ PolicyTensor ──make: weight + scale * B A, cast──▶ an engine, or a file
   │   └─adapter_weights▶ the adapter alone, under peft's names
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan.plan import Plan
from torchgrpo.training.adapters import adapted, causal_model
from torchgrpo.training.quantization import dequantized, quantized, shape_and_dtype, state_without_scales
from torchgrpo.training.scoring import plain_scores
from torchgrpo.training.sharding import Within, directly, local, whole


@dataclass(frozen=True)
class PolicyTensor:
    """One tensor of the policy, made when it is asked for.

    source: as it lies in the learner, perhaps in 4 bits. layer: peft's, whose active adapters are added to it; None
    where it is whole. dtype: that it is made in. constant: the mark of the learner in which it is frozen, else None.
    """

    name: str
    source: torch.Tensor
    layer: Any
    dtype: torch.dtype
    constant: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_and_dtype(self.source, self._module)[0]

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def identity(self) -> Hashable:
        """Equal for the names of one tied tensor. Sources outlive a push, so their addresses are their own."""
        source = local(self.source)
        return source.data_ptr(), source.dtype, self.shape, source.stride(), self.dtype, id(self.layer)

    def make(self) -> torch.Tensor:
        """weight + scale * B A, rounded once."""
        with torch.no_grad():
            source = self.source.detach()
            return whole(self.merged(whole(source) if quantized(source) else source)).to(self.dtype)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` out of 4 bits, and the layer's active adapters, not rounded. weight: the source, or whole."""
        weight = dequantized(weight, self._module)
        for adapter in () if self.layer is None else self.layer.active_adapters:
            delta = self.layer.get_delta_weight(adapter)
            weight = weight + (delta if isinstance(weight, DTensor) else whole(delta))
        return weight

    @property
    def _module(self) -> Any:
        """That the source is of; None where it has no adapters, as every weight in 4 bits has."""
        return None if self.layer is None else self.layer.get_base_layer()


def named_weights(model: Any, dtype: torch.dtype | None = None) -> list[PolicyTensor]:
    """Every tensor of a policy under its Hugging Face name: tied heads under both names, LoRA merged in.

    The training weights are not touched. dtype: that every floating-point tensor is rounded to; None: their own.

    Raises:
        ConfigError: a LoRA variant without a plain merge (DoRA).
    """
    wrapped = adapted(model)
    base = model if wrapped is None else wrapped.get_base_model()
    modules = dict(base.named_modules())
    tensors = []
    for name, tensor in (base.state_dict() if wrapped is None else state_without_scales(base)).items():
        if wrapped is not None and ("lora_" in name or ".original_module." in name):
            continue
        adapts = wrapped is not None and ".base_layer." in name and tensor.ndim > 1
        layer: Any = modules[name.split(".base_layer.")[0]] if adapts else None  # whose adapters belong to it
        if adapts and any(layer.use_dora.get(adapter, False) for adapter in layer.active_adapters):
            raise ConfigError("a DoRA adapter cannot be pushed merged: train_model.lora supports plain LoRA")
        own = shape_and_dtype(tensor, None if layer is None else layer.get_base_layer())[1]
        rounded = own if dtype is None or not own.is_floating_point else dtype
        plain = name if wrapped is None else _plain_name(name)
        tensors.append(PolicyTensor(plain, tensor, layer, rounded))
    return tensors


def adapter_weights(model: Any) -> list[PolicyTensor]:
    """The LoRA tensors of a peft model alone, under peft's names (`inference_model.lora=adapter`)."""
    from peft.utils import get_peft_model_state_dict

    named: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    return [PolicyTensor(name, tensor, None, tensor.dtype) for name, tensor in named.items()]


def pushed_tensors(config: Config, plan: Plan) -> Callable[[Any], list[PolicyTensor]]:
    """What a push carries: full weights in the engines' dtype, whatever the way; adapters as they are."""
    if config.inference_model.lora == "adapter":
        return adapter_weights
    return partial(named_weights, dtype=getattr(torch, plan.weight_dtype))


def made(tensors: Iterable[PolicyTensor]) -> dict[str, torch.Tensor]:
    """All of them at once, by name."""
    return {tensor.name: tensor.make() for tensor in tensors}


class PolicyWeights:
    """The policy as engines and the weight check see it: tensors of a push, and scores.

    Args:
        model: the policy, possibly wrapped by peft.
        pushed: the tensors that a push carries: `named_weights` in the engines' dtype, or `adapter_weights`.
        within: where the model's parameters are whole.
    """

    def __init__(
        self, model: nn.Module, pushed: Callable[[Any], list[PolicyTensor]], within: Within = directly
    ) -> None:
        self.model = model
        self._pushed = pushed
        self._within = within
        self._mark = uuid4().hex

    @property
    def vocab_size(self) -> int:
        return int(causal_model(self.model).config.get_text_config().vocab_size)

    def publish(self) -> list[PolicyTensor]:
        """What a push carries; of frozen parameters without an adapter it tells that they never change."""
        parameters = causal_model(self.model).named_parameters(remove_duplicate=False)
        frozen = {_plain_name(name) for name, parameter in parameters if not parameter.requires_grad}
        return [
            replace(tensor, constant=self._mark) if tensor.layer is None and tensor.name in frozen else tensor
            for tensor in self._pushed(self.model)
        ]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of all tokens but the first, [count][length - 1]."""
        return plain_scores(self.model, sequences, temperature, self._within)


def _plain_name(name: str) -> str:
    """The Hugging Face name of a tensor inside peft's wrappers."""
    names = name.replace(".base_layer.", ".").split(".")
    if "modules_to_save" in names:
        at = names.index("modules_to_save")
        names = names[:at] + names[at + 2 :]
    return ".".join(names)
