"""Lazily built weights of one push, filtered per receiver, and the protocols of their transfer.

    learner.publish() ──make: merge, gather, cast──▶ one tensor ──▶ transport ──▶ the next tensor ...

A push therefore never holds a second copy of the model, even if adapters are merged or shards are gathered.

Every push describes all tensors. A constant tensor (a frozen parameter) carries a mark of its learner. A receiver that
has the tensor with this mark from an earlier push leaves it out. A new engine, or an engine that lost its weights, has
no marks and takes all tensors.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:  # engine processes have no learner and need not import ranks
    from torchgrpo.training.ranks import Ranks

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class PublishedTensor(Protocol):
    """Tensor that the learner publishes: its description, and a method that makes it."""

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
        """Key that only the names of one tied tensor share in a push."""
        ...

    @property
    def constant(self) -> Hashable:
        """Mark of the learner if the tensor never changes, else None."""
        ...

    def make(self) -> torch.Tensor:
        """Makes the complete tensor, of this dtype and on this device."""
        ...


class SequenceScorer(Protocol):
    """Model that scores sequences, which the weight check compares with the engines."""

    @property
    def vocab_size(self) -> int: ...
    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]: ...


@dataclass(frozen=True)
class ReadyTensor:
    """Published tensor that exists already and is sent unchanged."""

    name: str
    tensor: torch.Tensor
    constant: Hashable = None

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


def _module_name(name: str) -> str:
    """Returns the name of the module that a tensor belongs to.

    In a numbered layer this is the layer's child, such as `model.layers.0.mlp` with all its experts.
    """
    names = name.split(".")
    number_index = next((index for index, one in enumerate(names) if one.isdigit()), len(names) - 3)
    return ".".join(names[: max(number_index + 2, 1)])


@dataclass
class TransferSize:
    """Transferred bytes of a push, summed over all tensors each time they are made."""

    bytes: int = 0


class WeightUpdate:
    """Named tensors of one push, which every iteration makes anew.

    ranks: learner ranks that gather the tensors; None if this process makes them.
    transfer_size: counts the bytes of tensors made, in all subsets of one push together.
    """

    def __init__(
        self,
        tensors: Sequence[PublishedTensor],
        ranks: "Ranks | None" = None,
        transfer_size: TransferSize | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.ranks = ranks
        self.transfer_size = TransferSize() if transfer_size is None else transfer_size

    @classmethod
    def from_pairs(cls, weights: NamedTensors) -> "WeightUpdate":
        """Builds an update of (name, tensor) pairs, sent unchanged; returns a `WeightUpdate` as it is."""
        return weights if isinstance(weights, WeightUpdate) else cls([ReadyTensor(*pair) for pair in weights])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self.tensors:
            yield tensor.name, self.make(tensor)

    def make(self, tensor: PublishedTensor) -> torch.Tensor:
        """Makes one of `tensors` and counts its bytes."""
        self.transfer_size.bytes += nbytes(tensor)
        return tensor.make()

    @property
    def constants(self) -> dict[str, Hashable]:
        """Marks of the constant tensors, by name, which a receiver remembers."""
        return {tensor.name: tensor.constant for tensor in self.tensors if tensor.constant is not None}

    def missing_tensors(self, constants_before: Mapping[str, Hashable]) -> "WeightUpdate":
        """Returns the update restricted to tensors that a receiver lacks.

        constants_before: `constants` of the earlier push that the receiver has.
        """
        missing = [
            one for one in self.tensors if one.constant is None or constants_before.get(one.name) != one.constant
        ]
        return WeightUpdate(missing, self.ranks, self.transfer_size)

    def missing_modules(self, constants_before: Mapping[str, Hashable]) -> "WeightUpdate":
        """Returns the update restricted to modules of which a receiver lacks any tensor.

        An engine may stack several tensors of a module in one matrix, which must be written completely.
        """
        modules = {_module_name(tensor.name) for tensor in self.missing_tensors(constants_before).tensors}
        return WeightUpdate(
            [tensor for tensor in self.tensors if _module_name(tensor.name) in modules], self.ranks, self.transfer_size
        )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.tensors)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the tensors, in tensor order: the learner's first device first."""
        return tuple(dict.fromkeys(tensor.device for tensor in self.tensors))


class LiveEngines(Protocol):
    """Interface of a pool's live engines to a direct transfer; implemented by `EngineSupervisor`."""

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Process ids of the engines, which change whenever an engine is replaced."""
        ...

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Calls a method of all engines concurrently, each with its own arguments."""
        ...

    def remote_engines(self) -> "LiveEngines":
        """Returns the engines in a form that another process can call."""
        ...

    def stacks(self) -> str: ...


class DirectTransfer(Protocol):
    """Transfer from the learner's GPUs to those of the engines, without host memory."""

    def push(self, weights: WeightUpdate, version: int, engines: LiveEngines) -> None:
        """Pushes weights and returns when all engines sample with them."""
        ...
