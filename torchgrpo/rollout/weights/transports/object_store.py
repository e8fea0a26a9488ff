"""The transport `object_store`: Ray's object store, for engines on other hosts."""

from dataclasses import dataclass
from typing import Any

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_copy import Entry, Layout, Transport
from torchgrpo.rollout.weights.outgoing import Outgoing


def make_transport(plan: Plan) -> Transport:
    return Transport(ObjectStore())


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
