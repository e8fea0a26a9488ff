"""What a push carries, and who gives and takes it: tensors, each described at once and made only as it leaves.

    learner.publish() ──make: merge, gather, cast──▶ one tensor ──▶ transport ──▶ the next tensor ...

So a push never holds a second copy of the model, whatever lies behind a tensor: an adapter to be merged, or shards.

Every push describes all tensors. What never changes (a frozen parameter) bears its learner's mark, by which whoever
has it of an earlier push leaves it out; a new engine, or one that lost its weights, has none and takes everything.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:  # engines take weights in processes that have no learner
    from torchgrpo.training.ranks import Ranks

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

    @property
    def constant(self) -> Hashable:
        """Of a tensor with the same values in every push of its learner: a mark of that learner. Else None."""
        ...

    def make(self) -> torch.Tensor:
        """The whole tensor, of this dtype and on this device."""
        ...


class Scorer(Protocol):
    """A model that scores sequences, as the weight check compares engines with it."""

    @property
    def vocab_size(self) -> int: ...
    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]: ...


@dataclass(frozen=True)
class ReadyTensor:
    """A tensor that leaves as it is."""

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


def _part(name: str) -> str:
    """Where a tensor belongs: a child of a numbered layer (`model.layers.0.mlp`, all its experts too), or a module."""
    names = name.split(".")
    numbered = next((at for at, one in enumerate(names) if one.isdigit()), len(names) - 3)
    return ".".join(names[: max(numbered + 2, 1)])


@dataclass
class Tally:
    """How much of a push was moved: bytes of the tensors that were made, each time one was."""

    bytes: int = 0


class Outgoing:
    """The (name, tensor) pairs of one push, as often as somebody iterates over them.

    ranks: that gather the tensors; None where they come from this process. moved: counts what is made of them, in all
    parts of one push together.
    """

    def __init__(
        self, tensors: Sequence[PublishedTensor], ranks: "Ranks | None" = None, moved: Tally | None = None
    ) -> None:
        self.tensors = tuple(tensors)
        self.ranks = ranks
        self.moved = Tally() if moved is None else moved

    @classmethod
    def of(cls, weights: NamedTensors) -> "Outgoing":
        """Tensors that leave as they are; an `Outgoing` is itself."""
        return weights if isinstance(weights, Outgoing) else cls([ReadyTensor(*pair) for pair in weights])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self.tensors:
            yield tensor.name, self.make(tensor)

    def make(self, tensor: PublishedTensor) -> torch.Tensor:
        """One of `tensors`."""
        self.moved.bytes += nbytes(tensor)
        return tensor.make()

    @property
    def constants(self) -> dict[str, Hashable]:
        """The marks of what never changes, by name: what a receiver remembers of the push."""
        return {tensor.name: tensor.constant for tensor in self.tensors if tensor.constant is not None}

    def beyond(self, held: Mapping[str, Hashable]) -> "Outgoing":
        """What a receiver lacks. held: the `constants` of an earlier push that it has."""
        lacking = [one for one in self.tensors if one.constant is None or held.get(one.name) != one.constant]
        return Outgoing(lacking, self.ranks, self.moved)

    def parts_beyond(self, held: Mapping[str, Hashable]) -> "Outgoing":
        """What a receiver lacks, and all that an engine may have stacked with it in one matrix."""
        parts = {_part(tensor.name) for tensor in self.beyond(held).tensors}
        return Outgoing(
            [tensor for tensor in self.tensors if _part(tensor.name) in parts], self.ranks, self.moved
        )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.tensors)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the tensors lie, in their order: the learner's first device first."""
        return tuple(dict.fromkeys(tensor.device for tensor in self.tensors))


class Engines(Protocol):
    """The live engines of a pool as a direct transfer calls them; `Supervisor`."""

    @property
    def members(self) -> tuple[int, ...]:
        """Changes whenever an engine is replaced."""
        ...

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """The method of every engine at once, each with its own arguments."""
        ...

    def elsewhere(self) -> "Engines":
        """The same engines, for another process to call."""
        ...

    def stacks(self) -> str: ...


class DirectTransfer(Protocol):
    """From the learner's GPUs into those of the engines, past any host's memory."""

    def push(self, weights: Outgoing, version: int, engines: Engines) -> None:
        """Return when every one of the engines draws its tokens with these weights."""
        ...
