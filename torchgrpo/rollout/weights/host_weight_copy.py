"""Protocol of a push's host copy, `WeightTransport` record, and memory layout of the tensors.

    transport      direct transfer to the engines           host copy, from which all other engines load
    shared_memory  -                                        anonymous memory that all engines of this host map
    object_store   -                                        Ray's object store, for engines on other hosts
    nccl, ipc      vLLM's own (vllm_weight_transfer.py)     one of these two, written while the engines serve again
    in_process     no pool: the engine in the learner's process reads the live tensors

The transports are in transports/. The host copy of a push stays until the next push, so that an engine that replaces a
lost one loads the copy by itself. The copy holds all tensors. A push writes only tensors that may have changed, and
engines that have the constant tensors do not read them again.
"""

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torchgrpo.rollout.engines.engine_actor import WeightHandle
from torchgrpo.rollout.weights.weight_update import DirectTransfer, PublishedTensor, ReadyTensor, WeightUpdate, nbytes


class HostWeightCopy(Protocol):
    """Copy of the last push in host memory."""

    def write(self, weights: WeightUpdate) -> WeightHandle:
        """Overwrites the copy of the last push; no engine may be reading it.

        The returned handle can be opened in any process.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WeightTransport:
    """Transport of pushes to a pool: a host copy, and a direct transfer if available.

    Without a direct transfer all engines load the host copy.
    """

    host_copy: HostWeightCopy
    direct: DirectTransfer | None = None


@dataclass(frozen=True)
class TensorEntry:
    """Name, type, shape and offset of one tensor in a buffer.

    Names of a tied tensor share an offset. constant: mark of a constant tensor, see `PublishedTensor`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    constant: Hashable = None

    def view(self, buffer: Any) -> torch.Tensor:
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)

    def to_ready_tensor(self, buffer: Any) -> ReadyTensor:
        return ReadyTensor(self.name, self.view(buffer), self.constant)


@dataclass
class WeightLayout:
    """Layout of an update's tensors in a buffer, each aligned to 64 bytes.

    entries: of all names. stored_tensors: tensors with bytes of their own; the second name of a tied tensor has none.
    size: of the buffer in bytes.
    """

    weights: WeightUpdate
    entries: list[TensorEntry] = field(default_factory=list)
    stored_tensors: list[tuple[TensorEntry, PublishedTensor]] = field(default_factory=list)
    size: int = 0

    @classmethod
    def from_update(cls, weights: WeightUpdate) -> "WeightLayout":
        layout = cls(weights)
        offsets: dict[Hashable, int] = {}
        for tensor in weights.tensors:
            known_offset = offsets.get(tensor.identity) if nbytes(tensor) else None
            offset = layout.size if known_offset is None else known_offset
            entry = TensorEntry(tensor.name, tensor.dtype, tensor.shape, offset, tensor.constant)
            layout.entries.append(entry)
            if known_offset is None:
                offsets[tensor.identity] = layout.size
                layout.stored_tensors.append((entry, tensor))
                layout.size += -(-nbytes(tensor) // 64) * 64
        return layout

    def write(self, buffer: Any, stored_entries: Collection[TensorEntry] = ()) -> None:
        """Writes the tensors into a buffer, except constant tensors that it holds already.

        stored_entries: entries of the push that the buffer holds.
        """
        for entry, tensor in self.stored_tensors:
            if entry.constant is None or entry not in stored_entries:
                entry.view(buffer).copy_(self.weights.make(tensor))
