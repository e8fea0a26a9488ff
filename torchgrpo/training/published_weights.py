"""Policy tensors for pushes and exports, adapters merged in, and log-probs for the weight check.

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
from torchgrpo.training.adapters import causal_model, peft_model_of
from torchgrpo.training.plain_log_probs import plain_log_probs
from torchgrpo.training.quantization import (
    dequantize_weight,
    dequantized_shape_and_dtype,
    is_quantized,
    state_dict_without_scales,
)
from torchgrpo.training.sharding import UnshardedContext, full_tensor, local_shard, no_sharding


@dataclass(frozen=True)
class PolicyTensor:
    """One tensor of the policy, computed when `make` is called.

    source: the tensor in the learner, perhaps in 4 bits. layer: the peft layer whose active adapters are
    added; None without adapters. dtype: dtype of the result. constant: identifier of the learner in which the
    tensor is frozen, otherwise None.
    """

    name: str
    source: torch.Tensor
    layer: Any
    dtype: torch.dtype
    constant: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return dequantized_shape_and_dtype(self.source, self._module)[0]

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def identity(self) -> Hashable:
        """Key that is equal for the names of one tied tensor.

        A source outlives a push, so no two sources share an address.
        """
        source = local_shard(self.source)
        return source.data_ptr(), source.dtype, self.shape, source.stride(), self.dtype, id(self.layer)

    def make(self) -> torch.Tensor:
        """Computes the full tensor, weight + scale * B A, rounded once.

        Shards are merged and rounded before they are gathered, so that the links carry the bytes of `dtype`.
        """
        with torch.no_grad():
            source = self.source.detach()
            merged = self.merge_adapters(full_tensor(source) if is_quantized(source) else source)
            return full_tensor(merged.to(self.dtype))

    def merge_adapters(self, weight: torch.Tensor) -> torch.Tensor:
        """Dequantizes `weight` and adds the layer's active adapters in float32.

        weight: the source, or its full tensor.
        """
        weight = dequantize_weight(weight, self._module)
        for adapter in () if self.layer is None else self.layer.active_adapters:
            delta = self.layer.get_delta_weight(adapter)
            delta = delta.to(torch.promote_types(delta.dtype, torch.float32))  # the sum is rounded by `make` alone
            weight = weight + (delta if isinstance(weight, DTensor) else full_tensor(delta))
        return weight

    @property
    def _module(self) -> Any:
        """The layer that the source belongs to; None without adapters. Every 4-bit weight has adapters."""
        return None if self.layer is None else self.layer.get_base_layer()


def named_weights(model: Any, dtype: torch.dtype | None = None) -> list[PolicyTensor]:
    """Returns every tensor of a policy under its Hugging Face name, adapters merged in.

    A tied head appears under both names. The training weights are not touched. dtype: dtype of every
    floating-point tensor; None: its own.

    Raises:
        ConfigError: a LoRA variant without a plain merge (DoRA).
    """
    peft_model = peft_model_of(model)
    base = model if peft_model is None else peft_model.get_base_model()
    modules = dict(base.named_modules())
    tensors = []
    for name, tensor in (base.state_dict() if peft_model is None else state_dict_without_scales(base)).items():
        if peft_model is not None and ("lora_" in name or ".original_module." in name):
            continue
        has_adapter = peft_model is not None and ".base_layer." in name and tensor.ndim > 1
        layer: Any = modules[name.split(".base_layer.")[0]] if has_adapter else None
        if has_adapter and any(layer.use_dora.get(adapter, False) for adapter in layer.active_adapters):
            raise ConfigError("a DoRA adapter cannot be pushed merged: train_model.lora supports plain LoRA")
        own_dtype = dequantized_shape_and_dtype(tensor, None if layer is None else layer.get_base_layer())[1]
        target_dtype = own_dtype if dtype is None or not own_dtype.is_floating_point else dtype
        plain = name if peft_model is None else _plain_name(name)
        tensors.append(PolicyTensor(plain, tensor, layer, target_dtype))
    return tensors


def adapter_weights(model: Any) -> list[PolicyTensor]:
    """Returns the LoRA tensors of a peft model alone, under peft's names (`inference_model.lora=adapter`)."""
    from peft.utils import get_peft_model_state_dict

    named: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    return [PolicyTensor(name, tensor, None, tensor.dtype) for name, tensor in named.items()]


def push_tensor_source(config: Config, plan: Plan) -> Callable[[Any], list[PolicyTensor]]:
    """Returns the function that lists the tensors of a push.

    Full weights are in the engines' dtype; adapters keep their dtype.
    """
    if config.inference_model.lora == "adapter":
        return adapter_weights
    return partial(named_weights, dtype=getattr(torch, plan.weight_dtype))


def make_tensors(tensors: Iterable[PolicyTensor]) -> dict[str, torch.Tensor]:
    """Computes all tensors at once and returns them by name."""
    return {tensor.name: tensor.make() for tensor in tensors}


class PolicyWeights:
    """The policy for engines and the weight check: tensors of a push, and log-probs.

    Args:
        model: the policy, possibly wrapped by peft.
        tensor_source: lists the tensors of a push; see `push_tensor_source`.
        unsharded_context: runs a computation while the full parameters are gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        tensor_source: Callable[[Any], list[PolicyTensor]],
        unsharded_context: UnshardedContext = no_sharding,
    ) -> None:
        self.model = model
        self._tensor_source = tensor_source
        self._unsharded_context = unsharded_context
        self._learner_id = uuid4().hex

    @property
    def vocab_size(self) -> int:
        return int(causal_model(self.model).config.get_text_config().vocab_size)

    def publish(self) -> list[PolicyTensor]:
        """Returns the tensors of a push; frozen parameters without an adapter are marked as constant."""
        parameters = causal_model(self.model).named_parameters(remove_duplicate=False)
        frozen = {_plain_name(name) for name, parameter in parameters if not parameter.requires_grad}
        return [
            replace(tensor, constant=self._learner_id) if tensor.layer is None and tensor.name in frozen else tensor
            for tensor in self._tensor_source(self.model)
        ]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Returns the log-probs of all tokens but the first, [count][length - 1]."""
        return plain_log_probs(self.model, sequences, temperature, self._unsharded_context)


def _plain_name(name: str) -> str:
    """Removes the parts of a tensor's name that peft's wrappers add."""
    names = name.replace(".base_layer.", ".").split(".")
    if "modules_to_save" in names:
        start = names.index("modules_to_save")
        names = names[:start] + names[start + 2 :]
    return ".".join(names)
