"""Weight transport `shared_memory`: host copy in anonymous memory that all engines of this host map."""

import mmap
import os
from dataclasses import dataclass

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_weight_copy import TensorEntry, WeightLayout, WeightTransport
from torchgrpo.rollout.weights.weight_update import WeightUpdate


def make_transport(plan: Plan) -> WeightTransport:
    return WeightTransport(SharedMemory())


@dataclass(frozen=True)
class MappedWeights:
    """Handle of weights in `SharedMemory`, for any process of this user and host."""

    path: str
    size: int
    entries: list[TensorEntry]

    def open(self) -> WeightUpdate:
        with open(self.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        return WeightUpdate([entry.to_ready_tensor(memory) for entry in self.entries])


class SharedMemory:
    """Host copy in one anonymous block of memory, which the kernel frees with this process."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._memory: mmap.mmap | None = None
        self._stored_entries: frozenset[TensorEntry] = frozenset()

    def write(self, weights: WeightUpdate) -> MappedWeights:
        layout = WeightLayout.from_update(weights)
        if self._memory is None or len(self._memory) < layout.size:
            self.close()
            self._file = os.memfd_create("grpo_weights")
            os.ftruncate(self._file, layout.size)
            self._memory = mmap.mmap(self._file, layout.size)
        stored_entries, self._stored_entries = self._stored_entries, frozenset()
        layout.write(self._memory, stored_entries)
        self._stored_entries = frozenset(layout.entries)
        return MappedWeights(f"/proc/{os.getpid()}/fd/{self._file}", layout.size, layout.entries)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._memory, self._stored_entries = None, None, frozenset()
