"""Copies nested tensors to another device in one block.

host tensors ──▶ one pinned block ──one asynchronous copy──▶ views of a block on the GPU

The host waits for every copy from memory that is not pinned, and for every copy from a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
ALIGNMENT = 256
"""Alignment of each tensor in a block in bytes, as for separate tensors on a GPU."""


def copy_to_device(values: T, device: torch.device) -> T:
    """Copies all tensors of `values` to a device with one copy.

    The host does not wait for a copy to a GPU. Tensors that are on a device of this type are not copied; the others
    must be on one device. values: tensors in dataclasses, dictionaries, lists and tuples, nested in any way.
    """
    tensors: list[Tensor] = []

    def add_tensor(tensor: Tensor) -> Tensor:
        if tensor.device.type != device.type:
            tensors.append(tensor)
        return tensor

    _map_tensors(values, add_tensor)
    if not tensors:
        return values
    copies = iter(_copy_block(tensors, device))
    return _map_tensors(values, lambda tensor: tensor if tensor.device.type == device.type else next(copies))


def _copy_block(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors of one device to another through one block of memory.

    For a GPU the block is pinned, since the host waits for a copy from pageable memory.
    """
    to_gpu = device.type == "cuda"
    starts = list(accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0))
    block = torch.empty(starts.pop(), dtype=torch.uint8, device=tensors[0].device, pin_memory=to_gpu)
    for tensor, start in zip(tensors, starts, strict=True):
        _block_view(block, tensor, start).copy_(tensor)
    copied_block = block.to(device, non_blocking=to_gpu)
    return [_block_view(copied_block, tensor, start) for tensor, start in zip(tensors, starts, strict=True)]


def _block_view(block: Tensor, tensor: Tensor, start: int) -> Tensor:
    """Views bytes of a block as a tensor with the dtype and shape of `tensor`."""
    return block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _map_tensors(values: T, function: Callable[[Tensor], Tensor]) -> T:
    """Applies a function to each tensor in nested values, in their order."""
    mapped: Any = values
    if isinstance(values, Tensor):
        mapped = function(values)
    elif isinstance(values, dict):
        mapped = {key: _map_tensors(value, function) for key, value in values.items()}
    elif isinstance(values, list | tuple):
        mapped = type(values)(_map_tensors(value, function) for value in values)
    elif is_dataclass(values) and not isinstance(values, type):
        members = {field.name: _map_tensors(getattr(values, field.name), function) for field in fields(values)}
        mapped = replace(values, **members)
    return mapped  # type: ignore[no-any-return]
