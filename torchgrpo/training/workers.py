"""Interface of a learner's workers, and its implementation by one worker in this process.

`rank_workers.py` implements the interface with ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchgrpo.training.published_weights import PolicyTensor
from torchgrpo.training.worker import MicrobatchTask, Worker, WorkerOutput

if TYPE_CHECKING:  # importing Ray is slow, and a learner in this process does not need it
    from torchgrpo.training.ranks import Ranks
    from torchgrpo.training.tensor_stream import RankTensor


class Workers(Protocol):
    """The workers of a learner, which take part in every call together.

    count: number of workers. packs: `ResponseScorer.packs` of their scorers. has_reference: the workers hold
    the reference, and score with it between passes of the policy. ranks: the worker processes; None where the
    worker is in this process.
    """

    count: int
    packs: bool
    has_reference: bool
    ranks: "Ranks | None"
    vocab_size: int

    def call_all(self, method: str, *arguments: Any) -> Any:
        """Calls a method of every worker and returns the answer, the same for all."""
        ...

    def call_each(self, method: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of every worker with its share; returns the answers in order."""
        ...

    def gradients(self, rounds: Iterator[list[MicrobatchTask]]) -> list[WorkerOutput]:
        """Calls `Worker.gradients` of every worker. A round is one microbatch of each worker, at once."""
        ...

    def publish(self) -> "Sequence[PolicyTensor] | Sequence[RankTensor]":
        """Returns every tensor of the policy that a push carries; see `Learner.publish`."""
        ...

    def save(self, folder: Path) -> Callable[[], None]:
        """Begins to write a checkpoint; see `Learner.save`."""
        ...

    def close(self) -> None:
        """Ends the processes of the workers."""
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

    def gradients(self, rounds: Iterator[list[MicrobatchTask]]) -> list[WorkerOutput]:
        self.worker.begin_step()
        self.worker.gradients(task for (task,) in rounds)
        return [self.worker.take_output()]

    def publish(self) -> Sequence[PolicyTensor]:
        return self.worker.publish()

    def save(self, folder: Path) -> Callable[[], None]:
        return self.worker.save(folder)

    def close(self) -> None: ...
