"""Operations for whose result CUDA makes the host wait, and the line of the project that calls them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
PROJECT = str(Path(__file__).resolve().parent.parent / "torchgrpo")

SIZED_BY_VALUES = {
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.masked_scatter_backward,
}
"""Operations whose result has a shape that depends on values, so that the host waits for the shape."""

READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
"""Operations with a number as their result."""

INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


def waiting_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Returns why an operation on a GPU makes the host wait; None if it does not."""
    packet = func.overloadpacket
    if packet in READS:
        return "read of a number"
    if packet in SIZED_BY_VALUES:
        return str(packet).removeprefix("aten.")
    if packet in INDEXING and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]):
        return "index by a mask"
    if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
        return "repeat_interleave"
    return None


def calling_line() -> str:
    """Returns the innermost line of the project on the stack, as `training/worker.py:10`."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PROJECT):
        if frame.f_back is None:
            return "a line outside the project"
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(PROJECT + '/')}:{frame.f_lineno}"
