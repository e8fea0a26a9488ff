"""The ways of weights from the learner to the engines, behind one `push`.

InProcess      engine in this process     live tensors, copied by the engine
SharedMemory   engines on this host       one copy into memory that all of them map
ObjectStore    engines on other hosts     one copy into Ray's object store
NativeTransfer engines on GPUs            vLLM's own API: nccl, or ipc on one device (vllm_transfer.py)

What a push carries is an `Outgoing` (weights.py), whose tensors are made one at a time, as they are written.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rollout.engines.host import WeightHandle
from rollout.engines.sampler import Engine
from rollout.weights.outgoing import Outgoing, Part

Deliver = Callable[[WeightHandle, int], None]


class Transport(Protocol):
    name: str

    def push(self, weights: Outgoing, version: int) -> None:
        """Return when every live engine draws its tokens with these weights."""
        ...

    def close(self) -> None: ...


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
    stored: list[tuple[Entry, Part]] = field(default_factory=list)
    size: int = 0

    @classmethod
    def of(cls, weights: Outgoing) -> "Layout":
        layout = cls()
        places: dict[tuple[object, ...], int] = {}
        for part in weights.parts:
            known = places.get(part.identity) if part.nbytes else None
            offset = layout.size if known is None else known
            entry = Entry(part.name, part.dtype, tuple(part.source.shape), offset)
            layout.entries.append(entry)
            if known is None:
                places[part.identity] = layout.size
                layout.stored.append((entry, part))
                layout.size += -(-part.nbytes // 64) * 64
        return layout

    def write(self, buffer: Any) -> None:
        for entry, part in self.stored:
            entry.view(buffer).copy_(part.make())


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


class InProcess:
    """An engine in this process reads the learner's tensors themselves."""

    name = "in_process"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def push(self, weights: Outgoing, version: int) -> None:
        self._engine.load_weights(weights, version)

    def close(self) -> None:
        pass


class SharedMemory:
    """One anonymous block of memory, filled anew by each push; the kernel frees it with this process.

    deliver: hands a handle to every engine and returns when all have loaded it.
    """

    name = "shared_memory"

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._file: int | None = None
        self._mapped: mmap.mmap | None = None

    def push(self, weights: Outgoing, version: int) -> None:
        layout = Layout.of(weights)
        if self._mapped is None or len(self._mapped) < layout.size:
            self.close()
            self._file = os.memfd_create("grpo_weights")
            os.ftruncate(self._file, layout.size)
            self._mapped = mmap.mmap(self._file, layout.size)
        layout.write(self._mapped)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._deliver(MappedWeights(path, layout.size, layout.entries), version)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._mapped = None, None


class ObjectStore:
    """Ray's object store carries the bytes to whichever hosts the engines are on."""

    name = "object_store"

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def push(self, weights: Outgoing, version: int) -> None:
        import numpy as np
        import ray

        layout = Layout.of(weights)
        packed = np.empty(layout.size, dtype=np.uint8)
        layout.write(packed)
        self._deliver(StoredWeights(ray.put(packed), layout.entries), version)

    def close(self) -> None:
        pass
