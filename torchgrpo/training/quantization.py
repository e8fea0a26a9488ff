"""Weights in 4 bits (nf4, by bitsandbytes), as the values that they stand for.

a linear layer's weight [out, in] ──load_in_4bit──▶ uint8 [out * in / 2, 1], the layer has its scales
                                                    └─dequantized──▶ [out, in]
"""

from typing import Any

import torch
from torch import nn


def quantized(weight: torch.Tensor) -> bool:
    """Whether it is in 4 bits. No other weight of a model consists of whole numbers."""
    return weight.dtype == torch.uint8


def dequantized(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """[out, in], in the dtype that the weight was loaded in.

    weight: of `layer`, whole; one that is not in 4 bits is itself.
    """
    if not quantized(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(weight, layer.quant_state)
    return values


def through_4_bits(weight: torch.Tensor) -> torch.Tensor:
    """A whole weight [out, in] as `load_in_4bit` has it: quantized, and out of 4 bits again."""
    from bitsandbytes.functional import dequantize_4bit

    packed, scales = packed_in_4_bits(weight)
    values: torch.Tensor = dequantize_4bit(packed, scales)
    return values


def packed_in_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """uint8 [out * in / 2, 1], and its scales."""
    from bitsandbytes.functional import quantize_4bit

    packed, scales = quantize_4bit(weight.contiguous(), compress_statistics=True, quant_type="nf4")
    return packed, scales


def shape_and_dtype(weight: torch.Tensor, layer: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Those of `dequantized(weight, layer)`."""
    if not quantized(weight):
        return tuple(weight.shape), weight.dtype
    return tuple(layer.quant_state.shape), layer.quant_state.dtype


def state_without_scales(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model, of weights in 4 bits these alone."""
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    named = {*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
    return {name: tensor for name, tensor in model.state_dict().items() if name in named}
