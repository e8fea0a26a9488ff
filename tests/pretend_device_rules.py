"""The rules of CUDA for the device of an ATen operation, after ATen's own checks.

Most operations require all operands on one device. Pointwise ones (TensorIterator.cpp, `allow_cpu_scalars`)
accept one 0-dimensional CPU tensor among CUDA tensors; indexing accepts indices on the CPU; copies read any
device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
CPU = torch.device("cpu")
ANYWHERE = torch.device("meta", 99)
"""Device of a tensor that the backward pass created from nothing: it joins the first device that it meets."""

COPIES = {aten.copy_, aten._foreach_copy_, aten._to_copy, aten._local_scalar_dense, aten.set_}
"""Operations that read one device and write another, or need no device."""

INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}
SCALAR_OPERANDS = {aten.masked_fill, aten.masked_fill_, aten.fill_, aten.where, aten.index_put, aten.index_put_}
"""Operations, besides pointwise ones, that accept a 0-dimensional CPU tensor among CUDA tensors."""

TERNARY = {aten.addcmul, aten.addcdiv, aten.addcmul_, aten.addcdiv_, aten.clamp, aten.clamp_}
"""Pointwise operations that do not accept one."""

DeviceLookup = Callable[[Tensor], torch.device]


def common_device(device_of: DeviceLookup, func: Any, args: Sequence[Any], operands: Sequence[Tensor]) -> torch.device:
    """Returns the device on which `func` runs; the CPU for meta tensors.

    device_of: returns the device that a tensor pretends to be on. operands: the tensors among all arguments,
    at least one.

    Raises:
        RuntimeError: CUDA could not combine the devices of the operands.
    """
    packet = func.overloadpacket
    if packet in COPIES:
        return device_of(operands[0])
    if packet in INDEXING:
        _check_indices(device_of, args)
        operands = [args[0], *args[2:3]]
    operand_devices = [device_of(tensor) for tensor in operands if isinstance(tensor, Tensor)]
    devices = {one for one in operand_devices if one is not ANYWHERE}
    if any(device.type == "meta" for device in devices):
        return CPU
    if len(devices) < 2:
        return devices.pop() if devices else ANYWHERE
    on_host = [tensor for tensor, one in zip(operands, operand_devices, strict=True) if one == CPU]
    gpus = devices - {CPU}
    if len(gpus) == 1 and len(on_host) == 1 and _may_be_on_host(func, on_host[0], args):
        return gpus.pop()
    first, second, *_ = dict.fromkeys(map(str, operand_devices))
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(simulated, in {func})"
    )


def _may_be_on_host(func: Any, scalar: Tensor, args: Sequence[Any]) -> bool:
    """Whether a CPU scalar may mix with CUDA tensors in an operation.

    Pointwise operations accept one 0-dimensional CPU tensor that is only read.
    """
    packet = func.overloadpacket
    pointwise = torch.Tag.pointwise in func.tags and packet not in TERNARY
    is_written = bool(func._schema.is_mutable) and args[0] is scalar
    selects_condition = packet is aten.where and args[0] is scalar
    return scalar.dim() == 0 and not is_written and not selects_condition and (pointwise or packet in SCALAR_OPERANDS)


def _check_indices(device_of: DeviceLookup, args: Sequence[Any]) -> None:
    """Refuses indices on another GPU than the indexed tensor."""
    indexed = device_of(args[0])
    for index in args[1]:
        if index is not None and device_of(index) not in (CPU, indexed, ANYWHERE) and indexed is not ANYWHERE:
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({indexed}), "
                f"got {device_of(index)} (simulated)"
            )


def check_generator(generator: torch.Generator | None, device: torch.device) -> None:
    """Refuses a CPU generator for an operation on a GPU, as CUDA does."""
    if generator is not None and device.type == "cuda" and generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu' (simulated)")
