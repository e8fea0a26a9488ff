"""What a push carries: tensors whose names and shapes are known at once, each made only as it leaves.

    learner.publish() ──make: merge, gather, cast──▶ one tensor ──▶ transport ──▶ the next tensor ...

So a push never holds a second copy of the model, whatever lies behind a tensor: an adapter to be merged, or shards.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class PublishedTensor(Protocol):
    """One tensor that the learner publishes, described before it is made."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    @property
    def identity(self) -> Hashable:
        """Equal for the names of one tied tensor, and for no others of the same push."""
        ...

    def make(self) -> torch.Tensor:
        """The whole tensor, of this dtype and on this device."""
        ...


@dataclass(frozen=True)
class ReadyTensor:
    """A tensor that leaves as it is."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def identity(self) -> Hashable:
        return self.tensor.data_ptr(), self.dtype, self.shape, self.tensor.stride()

    def make(self) -> torch.Tensor:
        return self.tensor.detach()


def nbytes(tensor: PublishedTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


class Outgoing:
    """The (name, tensor) pairs of one push, as often as somebody iterates over them."""

    def __init__(self, tensors: Sequence[PublishedTensor]) -> None:
        self.tensors = tuple(tensors)

    @classmethod
    def of(cls, weights: NamedTensors) -> "Outgoing":
        """Tensors that leave as they are; an `Outgoing` is itself."""
        return weights if isinstance(weights, Outgoing) else cls([ReadyTensor(*pair) for pair in weights])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self.tensors:
            yield tensor.name, tensor.make()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.tensors)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the tensors lie, in their order: the learner's first device first."""
        return tuple(dict.fromkeys(tensor.device for tensor in self.tensors))
