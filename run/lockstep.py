"""What grpo.py works with: engines generate, then the learner optimises, in turn, in one thread."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from config.schema import Config
from run.run import Run

if TYPE_CHECKING:
    from envs.group import Group
    from rollout.collect import Collector


class Lockstep(Run):
    """A run whose every batch is on-policy."""

    script = "grpo.py"
    other_script = "grpo_async.py"
    overlapped = False

    @staticmethod
    def total(config: Config) -> int:
        return config.total_iterations

    @cached_property
    def collector(self) -> "Collector":
        from rollout.collect import Collector

        return Collector(
            self.loop,
            self.rollouts,
            self.prompts,
            self.wants,
            self.config.policy.filter_attempts,
            self.monitor.live.stage,
        )

    def iterations(self) -> Iterator[int]:
        """Iteration numbers, until the last or a stop."""
        return self.count()

    def collect(self) -> "list[Group]":
        """The groups of one iteration. Engines that share the learner's GPUs sleep afterwards."""
        with self.monitor.timed("collect"):
            groups = self.collector.collect(self.config.prompts_per_iteration)
            self.weights.rest_engines()
        return groups
