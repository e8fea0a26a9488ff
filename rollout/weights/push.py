"""The way of weights from the learner to the engines: versions, their proof, and who sleeps when.

wake ─▶ learner.publish() ─▶ target.load() ─▶ generation ─▶ rest_engines ─▶ look_at what was drawn ─▶ update
(where learner and engines take turns on a GPU)              (the same)
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rollout.engines.sampler import WeightTarget
from rollout.weights.canary import Canary
from rollout.weights.evidence import Answer, Drawn
from rollout.weights.outgoing import Learner, Outgoing


@dataclass
class Weights:
    """Pushes of the learner's weights into the engines, each proven by the canary before the next update.

    Version 0 is what a run starts from; each later push adds 1.

    takes_turns: engines sleep while the learner works, because they share its GPUs.
    watched: seconds that the proof of the last push has taken.
    """

    learner: Learner
    target: WeightTarget
    canary: Canary
    takes_turns: bool = False
    asleep: bool = False
    version: int = -1
    watched: float = 0.0

    def push(self) -> dict[str, float]:
        """Metrics of the canary, its seconds among them, where it compared.

        Raises:
            CanaryError: an engine does not have the learner's weights; the message names the cause.
        """
        self._wake_engines()
        self.watched = 0.0
        with self.watching():
            self.canary.before_push()
        self.version += 1
        self.target.load(Outgoing(self.learner.publish(), self.learner.ranks), self.version)
        with self.watching():
            found = self.canary.after_push(self.version)
        return found | {"canary/seconds": self.watched}

    @property
    def proven(self) -> bool:
        """Whether the engines have been seen to have the weights of the last push."""
        return self.canary.proven

    def look_at(
        self,
        drawn: Callable[[int], Mapping[str, Drawn]],
        ask: Callable[[], Answer] | None = None,
    ) -> dict[str, float]:
        """What engines drew since the last push, for the first time; whether that proves it, `proven` says.

        drawn: with a version's weights, by the engine's name. ask: as in `Canary.look_at`. Any thread may call this.
        Returns metrics as `push` does.
        """
        with self.watching():
            found = self.canary.look_at(drawn(self.version), ask)
        return found | {"canary/seconds": self.watched}

    def prove(self) -> dict[str, float]:
        """Compare engines and learner now; metrics and errors as of `push`."""
        with self.watching():
            found = self.canary.prove()
        return found | {"canary/seconds": self.watched}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What the block takes is part of the proof of the last push."""
        began = time.perf_counter()
        yield
        self.watched += time.perf_counter() - began

    def rest_engines(self) -> None:
        """The GPUs are the learner's now, until the next push; nothing where engines have their own."""
        if self.takes_turns and not self.asleep:
            self.target.sleep()
            self.asleep = True

    def _wake_engines(self) -> None:
        if self.asleep:
            self.learner.release_memory()
            self.target.wake()
            self.asleep = False
