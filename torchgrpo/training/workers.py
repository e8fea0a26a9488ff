"""Workers of a learner: the strategy that computes its steps, in this process or as ranks (`ranked_workers.py`)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchgrpo.training.published_weights import PolicyTensor
from torchgrpo.training.worker import Part, Piece, Worker

if TYPE_CHECKING:  # Ray costs a second, which a learner in this process need not wait for
    from torchgrpo.training.ranks import Ranks
    from torchgrpo.training.tensor_stream import RankTensor


class Workers(Protocol):
    """All workers of a learner, which take part in every call together.

    count: how many there are. packs: as `ResponseScorer.packs` of theirs. has_reference: they hold the reference, which
    scores in turns with the policy. ranks: their processes; None where the worker is in this one.
    """

    count: int
    packs: bool
    has_reference: bool
    ranks: "Ranks | None"
    vocab_size: int

    def call_all(self, method: str, *arguments: Any) -> Any:
        """Call a method of every worker; returns the first one's answer, which is the same for all."""
        ...

    def call_each(self, method: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method of every worker with its share; returns their answers in order."""
        ...

    def gradients(self, rounds: Iterator[list[Piece]]) -> list[Part]:
        """`Worker.gradients` of every worker. A round is one microbatch of each, at once."""
        ...

    def publish(self) -> "Sequence[PolicyTensor] | Sequence[RankTensor]":
        """Every tensor of the policy that a push carries; see `Learner.publish`."""
        ...

    def save(self, folder: Path) -> Callable[[], None]:
        """See `Learner.save`."""
        ...

    def close(self) -> None:
        """End the processes of the workers."""
        ...


class LocalWorkers:
    """One worker in this process, as `Workers`."""

    count = 1
    ranks: "Ranks | None" = None

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.packs = worker.scorer.packs
        self.has_reference = worker.reference is not None
        self.vocab_size = worker.vocab_size

    def call_all(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)

    def call_each(self, method: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        return [getattr(self.worker, method)(shares[0])]

    def gradients(self, rounds: Iterator[list[Piece]]) -> list[Part]:
        self.worker.begin_step()
        return [self.worker.gradients(piece for (piece,) in rounds)]

    def publish(self) -> Sequence[PolicyTensor]:
        return self.worker.publish()

    def save(self, folder: Path) -> Callable[[], None]:
        return self.worker.save(folder)

    def close(self) -> None: ...
