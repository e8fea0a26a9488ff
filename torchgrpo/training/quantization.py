"""Quantizes weights to nf4 with bitsandbytes, and dequantizes them.

a linear layer's weight [out, in] ──load_in_4bit──▶ uint8 [out * in / 2, 1], the layer has its scales
                                                    └─dequantize_weight──▶ [out, in]
"""

from typing import Any

import torch
from torch import nn


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight is in 4 bits.

    No other weight of a model has an integer dtype.
    """
    return weight.dtype == torch.uint8


def dequantize_weight(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """Returns the weight [out, in] in the dtype in which it was loaded.

    weight: the full weight of `layer`; a weight that is not in 4 bits is returned itself.
    """
    if not is_quantized(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(weight, layer.quant_state)
    return values


def round_trip_4bit(weight: torch.Tensor) -> torch.Tensor:
    """Quantizes a full weight [out, in] as `load_in_4bit` does, and dequantizes it again."""
    from bitsandbytes.functional import dequantize_4bit

    packed, scales = pack_4bit(weight)
    values: torch.Tensor = dequantize_4bit(packed, scales)
    return values


def pack_4bit(weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Quantizes a weight to nf4: uint8 [out * in / 2, 1] and the scales."""
    from bitsandbytes.functional import quantize_4bit

    packed, scales = quantize_4bit(weight.contiguous(), compress_statistics=True, quant_type="nf4")
    return packed, scales


def dequantized_shape_and_dtype(weight: torch.Tensor, layer: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns shape and dtype of `dequantize_weight(weight, layer)`, without its values."""
    if not is_quantized(weight):
        return tuple(weight.shape), weight.dtype
    return tuple(layer.quant_state.shape), layer.quant_state.dtype


def state_dict_without_scales(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict of a model without the scales of its 4-bit weights."""
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    named = {*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
    return {name: tensor for name, tensor in model.state_dict().items() if name in named}
