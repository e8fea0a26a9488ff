"""On which device CUDA would run an operation of ATen, and what it refuses; written after ATen's own checks.

Most operations want all operands on one device. Pointwise ones (TensorIterator.cpp, `allow_cpu_scalars`) take one
0-dimensional CPU tensor among CUDA tensors; indexing takes indices on the CPU; copies read any device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
CPU = torch.device("cpu")
ANYWHERE = torch.device("meta", 99)
"""Of a tensor that the backward pass made out of nothing: it joins the first device that it meets."""

COPIES = {aten.copy_, aten._foreach_copy_, aten._to_copy, aten._local_scalar_dense, aten.set_}
"""They read one device and write another, or need none."""

INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}
SCALAR_OPERANDS = {
    aten.masked_fill,
    aten.masked_fill_,
    aten.fill_,
    aten.where,
    aten.index_put,
    aten.index_put_,
}
"""Beside the pointwise operations, those that take a 0-dimensional CPU tensor among CUDA tensors."""

TERNARY = {aten.addcmul, aten.addcdiv, aten.addcmul_, aten.addcdiv_, aten.clamp, aten.clamp_}
"""Pointwise operations that do not."""

Place = Callable[[Tensor], torch.device]


def common_device(place: Place, func: Any, args: Sequence[Any], operands: Sequence[Tensor]) -> torch.device:
    """Where `func` runs; the CPU for what has no place at all (meta tensors).

    place: the device that a tensor pretends to be on. operands: the tensors among all arguments, at least one.
    Raises:
        RuntimeError: they lie where CUDA could not take them together.
    """
    packet = func.overloadpacket
    if packet in COPIES:
        return place(operands[0])
    if packet in INDEXING:
        _check_indices(place, args)
        operands = [args[0], *args[2:3]]
    places = [place(tensor) for tensor in operands if isinstance(tensor, Tensor)]
    devices = {one for one in places if one is not ANYWHERE}
    if any(device.type == "meta" for device in devices):
        return CPU
    if len(devices) < 2:
        return devices.pop() if devices else ANYWHERE
    on_host = [tensor for tensor, one in zip(operands, places, strict=True) if one == CPU]
    gpus = devices - {CPU}
    if len(gpus) == 1 and len(on_host) == 1 and _may_be_on_the_host(func, on_host[0], args):
        return gpus.pop()
    first, second, *_ = dict.fromkeys(map(str, places))
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(pretended, in {func})"
    )


def _may_be_on_the_host(func: Any, scalar: Tensor, args: Sequence[Any]) -> bool:
    """One 0-dimensional CPU tensor that is only read may mix with CUDA tensors, in pointwise operations."""
    packet = func.overloadpacket
    pointwise = torch.Tag.pointwise in func.tags and packet not in TERNARY
    written = bool(func._schema.is_mutable) and args[0] is scalar
    chooses = packet is aten.where and args[0] is scalar
    return scalar.dim() == 0 and not written and not chooses and (pointwise or packet in SCALAR_OPERANDS)


def _check_indices(place: Place, args: Sequence[Any]) -> None:
    own = place(args[0])
    for index in args[1]:
        if index is not None and place(index) not in (CPU, own, ANYWHERE) and own is not ANYWHERE:
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({own}), "
                f"got {place(index)} (pretended)"
            )


def check_generator(generator: torch.Generator | None, device: torch.device) -> None:
    if generator is not None and device.type == "cuda" and generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu' (pretended)")
