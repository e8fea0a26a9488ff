"""The way of weights from the learner to the engines: versions, the canary's proof, and who sleeps when.

wake ─▶ canary scores ─▶ learner.publish() ─▶ target.load() ─▶ canary compares ─▶ generation ─▶ rest_engines
(where learner and engines take turns on a GPU)                                            (the same)
"""

import time
from dataclasses import dataclass

from rollout.engines.sampler import WeightTarget
from rollout.weights.canary import Canary
from rollout.weights.outgoing import Learner, Outgoing


@dataclass
class Weights:
    """Pushes of the learner's weights into the engines, each proven by the canary.

    Version 0 is what a run starts from; each later push adds 1.

    takes_turns: engines sleep while the learner works, because they share its GPUs.
    """

    learner: Learner
    target: WeightTarget
    canary: Canary
    takes_turns: bool = False
    asleep: bool = False
    version: int = -1

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
        self.target.load(Outgoing(self.learner.publish(), self.learner.ranks), self.version)
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
            self.learner.release_memory()
            self.target.wake()
            self.asleep = False
