"""Weight transport `object_store`: host copy in Ray's object store, for engines on other hosts."""

from dataclasses import dataclass
from typing import Any

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_weight_copy import TensorEntry, WeightLayout, WeightTransport
from torchgrpo.rollout.weights.weight_update import WeightUpdate


def make_transport(plan: Plan) -> WeightTransport:
    return WeightTransport(ObjectStore())


@dataclass(frozen=True)
class StoredWeights:
    """Handle of weights in Ray's object store, which any worker of the cluster can open.

    references: of the stored objects. entries: in push order, each with the index of its object.
    """

    references: tuple[Any, ...]
    entries: list[tuple[int, TensorEntry]]

    def open(self) -> WeightUpdate:
        import ray

        stored = [ray.get(reference) for reference in self.references]
        return WeightUpdate([entry.to_ready_tensor(stored[index]) for index, entry in self.entries])


class ObjectStore:
    """Host copy in Ray's object store, which transfers it to the hosts of the engines.

    Constant tensors are an object of their own, which every push refers to and each host fetches once.
    """

    def __init__(self) -> None:
        self._constants_reference: Any = None
        self._stored_entries: frozenset[TensorEntry] | None = None

    def write(self, weights: WeightUpdate) -> StoredWeights:
        constants = weights.constants
        changing_tensors = weights.missing_tensors(constants)
        constant_tensors = WeightUpdate(
            [one for one in weights.tensors if one.name in constants], weights.ranks, weights.transfer_size
        )
        layouts = [WeightLayout.from_update(constant_tensors), WeightLayout.from_update(changing_tensors)]
        if self._stored_entries != frozenset(layouts[0].entries):
            self.close()
            self._constants_reference, self._stored_entries = (
                self._put_layout(layouts[0]),
                frozenset(layouts[0].entries),
            )
        references = (self._constants_reference, self._put_layout(layouts[1]))
        entries_by_name = {
            entry.name: (index, entry) for index, layout in enumerate(layouts) for entry in layout.entries
        }
        return StoredWeights(references, [entries_by_name[one.name] for one in weights.tensors])

    def _put_layout(self, layout: WeightLayout) -> Any:
        import numpy as np
        import ray

        packed = np.empty(layout.size, dtype=np.uint8)
        layout.write(packed)
        return ray.put(packed)

    def close(self) -> None:
        self._constants_reference, self._stored_entries = None, None
