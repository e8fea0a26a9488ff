"""Pushes of weights from the learner to the engines: versions, checks, sleep.

wake ─▶ learner.publish() ─▶ target.load() ─▶ weight check, when due ─▶ generation ─▶ rest_engines ─▶ update
(where learner and engines take turns on a GPU)                                          (the same)
"""

import time
from dataclasses import dataclass

from torchgrpo.rollout.engines.interface import WeightTarget
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.training.learner import Learner


@dataclass
class Weights:
    """Pushes of the learner's weights into the engines.

    Version 0 is what a run starts from; each later push adds 1.

    takes_turns: engines sleep while the learner works, because they share its GPUs.
    pushed_at: optimizer steps of the learner at the last push.
    """

    learner: Learner
    target: WeightTarget
    weight_check: WeightCheck
    takes_turns: bool = False
    asleep: bool = False
    version: int = -1
    pushed_at: int = -1

    def push(self) -> None:
        """Send all weights, as the next version."""
        if self.asleep:
            self.learner.release_memory()
            self.target.wake()
            self.asleep = False
        self.version += 1
        self.target.load(Outgoing(self.learner.publish(), self.learner.ranks), self.version)
        self.pushed_at = self.learner.optimizer_steps

    @property
    def current(self) -> bool:
        """Whether the learner still has the weights of the last push."""
        return self.learner.optimizer_steps == self.pushed_at

    def check_push(self) -> dict[str, float]:
        """`check`, where it is due at this push."""
        return self.check() if self.weight_check.due(self.version) else {}

    def check(self) -> dict[str, float]:
        """Compare engines and learner, once a push; returns metrics. Raises WeightMismatch with its cause."""
        known = (self.weight_check.version, self.weight_check.members) == (self.version, self.target.members)
        if known or self.asleep or not self.current:
            return {}
        began = time.perf_counter()
        found = self.weight_check.compare(self.version)
        return found | {"weight_check/seconds": time.perf_counter() - began}

    def rest_engines(self) -> None:
        """The GPUs are the learner's now, until the next push; nothing where engines have their own."""
        if self.takes_turns and not self.asleep:
            self.target.sleep()
            self.asleep = True
