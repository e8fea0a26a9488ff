"""Pushes weights as numbered policy versions, runs due weight checks, and puts engines to sleep.

wake ─▶ learner.publish() ─▶ target.load() ─▶ weight check, if due ─▶ generation ─▶ sleep_engines ─▶ training
(if learner and engines take turns on a GPU)                                        (in this case too)

Engines that stay awake beside the learner are never woken, and no memory is released for them.
"""

import time
from dataclasses import dataclass

from torchgrpo.rollout.engines.interface import WeightTarget
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.training.learner import Learner


@dataclass
class WeightPusher:
    """Pushes the learner's weights to the engines.

    Version 0 has the initial weights of a run; every later push adds 1.

    is_time_shared: engines sleep while the learner trains, because they share its GPUs.
    pushed_at_step: optimizer steps of the learner at the last push. must_check_pushes: a check was needed while the
    engines slept, so that every later push is checked before they sample.
    """

    learner: Learner
    target: WeightTarget
    weight_check: WeightCheck
    is_time_shared: bool = False
    engines_asleep: bool = False
    version: int = -1
    pushed_at_step: int = -1
    must_check_pushes: bool = False

    def push(self) -> None:
        """Pushes all weights as the next policy version."""
        if self.engines_asleep:
            self.learner.release_memory()
            self.target.wake()
            self.engines_asleep = False
        self.version += 1
        self.target.load(WeightUpdate(self.learner.publish(), self.learner.ranks), self.version)
        self.pushed_at_step = self.learner.optimizer_steps

    @property
    def is_current(self) -> bool:
        """Whether the learner still has the weights of the last push."""
        return self.learner.optimizer_steps == self.pushed_at_step

    def check_push(self) -> dict[str, float]:
        """Runs `check` if it is due at this push; returns metrics."""
        is_due = self.must_check_pushes or self.weight_check.is_due(self.version)
        return self.check() if is_due else {}

    def check(self) -> dict[str, float]:
        """Compares engines and learner, at most once for a push; returns metrics.

        Sleeping engines are compared at their next pushes instead. Raises WeightMismatch with its cause.
        """
        if self.engines_asleep:
            self.must_check_pushes = True
            return {}
        is_checked = (self.weight_check.version, self.weight_check.engine_pids) == (
            self.version,
            self.target.engine_pids,
        )
        if is_checked or not self.is_current:
            return {}
        began = time.perf_counter()
        comparison_metrics = self.weight_check.compare(self.version)
        return comparison_metrics | {"weight_check/seconds": time.perf_counter() - began}

    def sleep_engines(self) -> None:
        """Puts time-shared engines to sleep until the next push."""
        if self.is_time_shared and not self.engines_asleep:
            self.target.sleep()
            self.engines_asleep = True
