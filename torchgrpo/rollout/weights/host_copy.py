"""The ways of weights from the learner into the engines of a pool: one table, by the name that the plan gives.

    name           straight to the engines            the host copy, from which every other engine loads
    shared_memory  -                                  anonymous memory that all engines of this host map
    object_store   -                                  Ray's object store, for engines on other hosts
    nccl, ipc      vLLM's own (vllm_transfer.py)    one of these two, written while the engines serve again
    in_process     an engine in the learner's process reads the live tensors; no pool, nothing to choose here

The host copy of the last push stays until the next one: an engine that replaces a lost one loads it by itself. It holds
every tensor; a push writes those alone that may have changed, and engines that have the others read no more than these.
"""

import math
import mmap
import os
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torchgrpo.rollout.engines.host import WeightHandle
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


@dataclass(frozen=True)
class MappedWeights:
    """A handle on `SharedMemory`: any process of this user on this host can open it."""

    path: str
    size: int
    entries: list[Entry]

    def open(self) -> Outgoing:
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        return Outgoing([entry.ready(mapped) for entry in self.entries])


@dataclass(frozen=True)
class StoredWeights:
    """A handle on `ObjectStore`: any worker of the Ray cluster can open it.

    entries: in the order of the push, each with the index of its object.
    """

    references: tuple[Any, ...]
    entries: list[tuple[int, Entry]]

    def open(self) -> Outgoing:
        import ray

        stored = [ray.get(reference) for reference in self.references]
        return Outgoing([entry.ready(stored[index]) for index, entry in self.entries])


class SharedMemory:
    """One anonymous block of memory, filled anew by each push; the kernel frees it with this process."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._mapped: mmap.mmap | None = None
        self._there: frozenset[Entry] = frozenset()

    def write(self, weights: Outgoing) -> MappedWeights:
        layout = Layout.of(weights)
        if self._mapped is None or len(self._mapped) < layout.size:
            self.close()
            self._file = os.memfd_create("grpo_weights")
            os.ftruncate(self._file, layout.size)
            self._mapped = mmap.mmap(self._file, layout.size)
        there, self._there = self._there, frozenset()
        layout.write(self._mapped, there)
        self._there = frozenset(layout.entries)
        return MappedWeights(f"/proc/{os.getpid()}/fd/{self._file}", layout.size, layout.entries)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._mapped, self._there = None, None, frozenset()


class ObjectStore:
    """Ray's object store carries the bytes to whichever hosts the engines are on.

    What never changes is an object of its own, which every push refers to and a host fetches once.
    """

    def __init__(self) -> None:
        self._base: Any = None
        self._there: frozenset[Entry] | None = None

    def write(self, weights: Outgoing) -> StoredWeights:
        constants = weights.constants
        changing = weights.beyond(constants)
        fixed = Outgoing(
            [one for one in weights.tensors if one.name in constants], weights.ranks, weights.moved
        )
        places = [Layout.of(fixed), Layout.of(changing)]
        if self._there != frozenset(places[0].entries):
            self.close()
            self._base, self._there = self._put(places[0]), frozenset(places[0].entries)
        references = (self._base, self._put(places[1]))
        found = {entry.name: (index, entry) for index, place in enumerate(places) for entry in place.entries}
        return StoredWeights(references, [found[one.name] for one in weights.tensors])

    def _put(self, layout: Layout) -> Any:
        import numpy as np
        import ray

        packed = np.empty(layout.size, dtype=np.uint8)
        layout.write(packed)
        return ray.put(packed)

    def close(self) -> None:
        self._base, self._there = None, None
