"""The ways of weights from the learner into the engines of a pool: one table, by the name that the plan gives.

    name           straight to the engines            the host copy, from which every other engine loads
    shared_memory  -                                  anonymous memory that all engines of this host map
    object_store   -                                  Ray's object store, for engines on other hosts
    nccl, ipc      vLLM's own (vllm_transfer.py)    one of these two, written while the engines serve again
    in_process     an engine in the learner's process reads the live tensors; no pool, nothing to choose here

The host copy of the last push stays until the next one: an engine that replaces a lost one loads it by itself.
"""

import math
import mmap
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from plan.devices import TransportName
from plan.plan import Plan
from rollout.engines.host import WeightHandle
from rollout.weights.outgoing import DirectTransfer, Outgoing, PublishedTensor, nbytes


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
    """Where one tensor lies in a buffer; two names of a tied tensor share their bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def view(self, buffer: Any) -> torch.Tensor:
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)


@dataclass
class Layout:
    """The bytes of a push, one tensor after the other, each aligned to 64.

    stored: what is written; the second name of a tied tensor has an entry and no bytes of its own.
    """

    entries: list[Entry] = field(default_factory=list)
    stored: list[tuple[Entry, PublishedTensor]] = field(default_factory=list)
    size: int = 0

    @classmethod
    def of(cls, weights: Outgoing) -> "Layout":
        layout = cls()
        places: dict[Hashable, int] = {}
        for tensor in weights.tensors:
            known = places.get(tensor.identity) if nbytes(tensor) else None
            offset = layout.size if known is None else known
            entry = Entry(tensor.name, tensor.dtype, tensor.shape, offset)
            layout.entries.append(entry)
            if known is None:
                places[tensor.identity] = layout.size
                layout.stored.append((entry, tensor))
                layout.size += -(-nbytes(tensor) // 64) * 64
        return layout

    def write(self, buffer: Any) -> None:
        for entry, tensor in self.stored:
            entry.view(buffer).copy_(tensor.make())


@dataclass(frozen=True)
class MappedWeights:
    """A handle on `SharedMemory`: any process of this user on this host can open it."""

    path: str
    size: int
    entries: list[Entry]

    def open(self) -> Iterator[tuple[str, torch.Tensor]]:
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        yield from ((entry.name, entry.view(mapped)) for entry in self.entries)


@dataclass(frozen=True)
class StoredWeights:
    """A handle on `ObjectStore`: any worker of the Ray cluster can open it."""

    reference: Any
    entries: list[Entry]

    def open(self) -> Iterator[tuple[str, torch.Tensor]]:
        import ray

        stored = ray.get(self.reference)
        yield from ((entry.name, entry.view(stored)) for entry in self.entries)


class SharedMemory:
    """One anonymous block of memory, filled anew by each push; the kernel frees it with this process."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._mapped: mmap.mmap | None = None

    def write(self, weights: Outgoing) -> MappedWeights:
        layout = Layout.of(weights)
        if self._mapped is None or len(self._mapped) < layout.size:
            self.close()
            self._file = os.memfd_create("grpo_weights")
            os.ftruncate(self._file, layout.size)
            self._mapped = mmap.mmap(self._file, layout.size)
        layout.write(self._mapped)
        return MappedWeights(f"/proc/{os.getpid()}/fd/{self._file}", layout.size, layout.entries)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._mapped = None, None


class ObjectStore:
    """Ray's object store carries the bytes to whichever hosts the engines are on."""

    def write(self, weights: Outgoing) -> StoredWeights:
        import numpy as np
        import ray

        layout = Layout.of(weights)
        packed = np.empty(layout.size, dtype=np.uint8)
        layout.write(packed)
        return StoredWeights(ray.put(packed), layout.entries)

    def close(self) -> None:
        pass


def _native(plan: Plan) -> Transport:
    from cluster.runtime import own_address
    from rollout.weights.from_ranks import TransferFromRanks
    from rollout.weights.vllm_transfer import LOOPBACK, NativeTransfer

    inference, on_cluster = plan.config.inference_model, plan.devices.on_cluster
    direct: DirectTransfer = NativeTransfer(
        plan.transport,
        inference.tensor_parallel_size,
        own_address if on_cluster else lambda: LOOPBACK,
        timeout=inference.request_timeout_s,
    )
    if plan.devices.ranks > 1:
        direct = TransferFromRanks(direct)
    return Transport(ObjectStore() if on_cluster else SharedMemory(), direct)


TRANSPORTS: dict[TransportName, Callable[[Plan], Transport]] = {
    "shared_memory": lambda plan: Transport(SharedMemory()),
    "object_store": lambda plan: Transport(ObjectStore()),
    "nccl": _native,
    "ipc": _native,
}
"""What `Plan.transport` names (`plan.devices.transport` chooses it)."""
