"""Records where CUDA would make the host wait for a simulated GPU.

The host waits for copies from a GPU and for those of memory that is not pinned, for numbers that it reads, and
for shapes that depend on values.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

aten = torch.ops.aten
PROJECT = str(Path(__file__).resolve().parent.parent / "torchgrpo")

COPIES = {aten.copy_, aten._foreach_copy_}
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
"""Operations with a number as their result."""

SIZED_BY_VALUES = {
    *(aten.nonzero, aten.masked_select, aten.masked_scatter_backward),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive),
}
"""Operations whose result has a shape that depends on values."""

INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors among arguments or results.

    Searches nested lists and tuples, and a dictionary only at the top level.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    found = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += tensors_in(item)
    return found


class HostWaits(ABC):
    """Waits of the host, and the storages of pinned memory.

    waits: reason and line of every wait.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._pinned_storages: dict[int, StorageWeakRef] = {}

    @abstractmethod
    def device_of(self, tensor: Tensor) -> torch.device:
        """Returns the simulated device of `tensor`."""

    def pin(self, tensor: Tensor) -> Tensor:
        """Marks the memory of `tensor` as pinned, and returns the tensor."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            self._pinned_storages[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in pinned host memory."""
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._pinned_storages

    def record_wait(self, reason: str) -> None:
        """Records a wait at the present line of the project."""
        self.waits.append(f"{reason} at {calling_line()}")

    def record_copy(self, tensor: Tensor, target: torch.device, non_blocking: bool) -> None:
        """Records the wait of a copy between host and GPU.

        A copy to a GPU is asynchronous if it does not block and the host memory is pinned.
        """
        source = self.device_of(tensor)
        if source.type == "cuda" and target.type == "cpu":
            self.record_wait("copy to the host")
        elif source.type == "cpu" and target.type == "cuda" and not (non_blocking and self.is_pinned(tensor)):
            self.record_wait("copy from pageable memory" if non_blocking else "blocking copy from the host")

    def record_operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Records the waits of an operation of ATen."""
        tensors = tensors_in(args)
        if func.overloadpacket in COPIES:
            non_blocking = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
            for target, source in zip(tensors_in(args[:1]), tensors_in(args[1:2]), strict=True):
                self.record_copy(source, self.device_of(target), non_blocking)
        elif tensors and self.device_of(tensors[0]).type == "cuda":
            reason = waiting_reason(func, args, kwargs)
            if reason is not None:
                self.record_wait(reason)


def waiting_reason(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Returns why an operation on a GPU makes the host wait, or None."""
    packet = func.overloadpacket
    if packet in READS:
        return "read of a number"
    if packet in SIZED_BY_VALUES:
        return "shape of " + str(packet).removeprefix("aten.")
    if packet in INDEXING and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]):
        return "index by a mask"
    if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
        return "shape of repeat_interleave"
    return None


def calling_line() -> str:
    """Returns the innermost line of the project on the stack, as `training/worker.py:10`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PROJECT):
        frame = frame.f_back
    if frame is None:
        return "a line outside the project"
    return f"{frame.f_code.co_filename.removeprefix(PROJECT + '/')}:{frame.f_lineno}"
