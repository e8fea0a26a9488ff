"""The way of weights from the learner to the engines: versions, the canary's proof, and who sleeps when.

wake ─▶ canary scores ─▶ learner.publish() ─▶ target.load() ─▶ canary compares ─▶ generation ─▶ rest_engines
(where learner and engines take turns on a GPU)                                            (the same)
"""

import gc
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from rollout.engines.sampler import WeightTarget
from rollout.weights.canary import LearnerScores, Scores, Sequences
from rollout.weights.outgoing import Outgoing, PublishedTensor


class Publisher(Protocol):
    """The learner as a push sees it."""

    def publish(self) -> Sequence[PublishedTensor]:
        """Every tensor of the policy that a push carries, in the dtype in which it leaves."""
        ...


class Learner(Publisher, LearnerScores, Protocol):
    """The learner as engines and their canary see it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def tied_head(self) -> str | None:
        """The published name of a head that shares its tensor with the embeddings; None where there is none."""
        ...

    def rounding_error(self, sequences: Sequences, dtype: str, float8: bool) -> Scores:
        """What an engine's dtype, and the learner's own, may do to each score, [count][length - 1]."""
        ...


class Watcher(Protocol):
    """Who looks at every push: `rollout.weights.canary.Canary`."""

    def before_push(self) -> None: ...
    def after_push(self, version: int, received: frozenset[str]) -> dict[str, float]: ...


class Weights:
    """Pushes of the learner's weights into the engines, each proven by the canary.

    Version 0 is what a run starts from; each later push adds 1.

    Args:
        takes_turns: engines sleep while the learner works, because they share its GPUs.
    """

    def __init__(
        self, learner: Publisher, target: WeightTarget, canary: Watcher, takes_turns: bool = False
    ) -> None:
        self.learner = learner
        self.target = target
        self.canary = canary
        self.takes_turns = takes_turns
        self.asleep = False
        self.version = -1

    def push(self) -> dict[str, float]:
        """Metrics of the canary, its seconds among them.

        Raises:
            CanaryError: an engine does not have the learner's weights; the message names the cause.
        """
        self._wake_engines()
        began = time.perf_counter()
        self.canary.before_push()
        watched = time.perf_counter() - began
        self.version += 1
        self.target.load(Outgoing(self.learner.publish()), self.version)
        began = time.perf_counter()
        metrics = self.canary.after_push(self.version, self.target.received)
        return metrics | {"canary/seconds": watched + time.perf_counter() - began}

    def rest_engines(self) -> None:
        """The GPUs are the learner's now, until the next push; nothing where engines have their own."""
        if self.takes_turns and not self.asleep:
            self.target.sleep()
            self.asleep = True

    def _wake_engines(self) -> None:
        if self.asleep:
            gc.collect()
            torch.cuda.empty_cache()  # what the learner's allocator keeps, no other process can have
            self.target.wake()
            self.asleep = False
