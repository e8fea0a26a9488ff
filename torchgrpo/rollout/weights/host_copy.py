"""The copy of a push in the memory of hosts, and the layout of its tensors; transports/ has the ways of weights.

    name           straight to the engines            the host copy, from which every other engine loads
    shared_memory  -                                  anonymous memory that all engines of this host map
    object_store   -                                  Ray's object store, for engines on other hosts
    nccl, ipc      vLLM's own (vllm_transfer.py)    one of these two, written while the engines serve again
    in_process     an engine in the learner's process reads the live tensors; no pool, nothing to choose here

The host copy of the last push stays until the next one: an engine that replaces a lost one loads it by itself. It holds
every tensor; a push writes those alone that may have changed, and engines that have the others read no more than these.
"""

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torchgrpo.rollout.engines.engine_actor import WeightHandle
from torchgrpo.rollout.weights.outgoing import DirectTransfer, Outgoing, PublishedTensor, ReadyTensor, nbytes


class HostCopy(Protocol):
    """The last push in the memory of hosts."""

    def write(self, weights: Outgoing) -> WeightHandle:
        """Overwrite the push before, which nobody may be reading; the handle opens in any process."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Transport:
    """How a push reaches the engines of a pool. Where there is no direct way, all of them load the host copy."""

    copy: HostCopy
    direct: DirectTransfer | None = None


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a buffer; two names of a tied tensor share their bytes.

    constant: as of `PublishedTensor`.
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

    def ready(self, buffer: Any) -> ReadyTensor:
        return ReadyTensor(self.name, self.view(buffer), self.constant)


@dataclass
class Layout:
    """The bytes of `weights`, one tensor after the other, each aligned to 64.

    stored: what is written; the second name of a tied tensor has an entry and no bytes of its own.
    """

    weights: Outgoing
    entries: list[Entry] = field(default_factory=list)
    stored: list[tuple[Entry, PublishedTensor]] = field(default_factory=list)
    size: int = 0

    @classmethod
    def of(cls, weights: Outgoing) -> "Layout":
        layout = cls(weights)
        places: dict[Hashable, int] = {}
        for tensor in weights.tensors:
            known = places.get(tensor.identity) if nbytes(tensor) else None
            offset = layout.size if known is None else known
            entry = Entry(tensor.name, tensor.dtype, tensor.shape, offset, tensor.constant)
            layout.entries.append(entry)
            if known is None:
                places[tensor.identity] = layout.size
                layout.stored.append((entry, tensor))
                layout.size += -(-nbytes(tensor) // 64) * 64
        return layout

    def write(self, buffer: Any, there: Collection[Entry] = ()) -> None:
        """there: entries of the push that the buffer holds; those that never change are not written again."""
        for entry, tensor in self.stored:
            if entry.constant is None or entry not in there:
                entry.view(buffer).copy_(self.weights.make(tensor))
