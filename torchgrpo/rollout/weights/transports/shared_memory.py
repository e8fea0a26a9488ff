"""The transport `shared_memory`: anonymous memory that all engines of this host map."""

import mmap
import os
from dataclasses import dataclass

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_copy import Entry, Layout, Transport
from torchgrpo.rollout.weights.outgoing import Outgoing


def make_transport(plan: Plan) -> Transport:
    return Transport(SharedMemory())


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
