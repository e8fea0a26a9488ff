"""The schedule of grpo.py: engines generate, then the learner optimises, in turn, in one thread."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from config.schema.config import Config
from torchgrpo.run.training_run import Run

if TYPE_CHECKING:
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.rollout.env import EnginePolicy


class Lockstep(Run):
    """A run whose every batch is on-policy."""

    script = "grpo.py"
    other_script = "grpo_async.py"
    overlapped = False

    @staticmethod
    def total(config: Config) -> int:
        """Iterations of a whole run."""
        return config.total_iterations

    def iterations(self) -> Iterator[int]:
        """Iteration numbers, until the last or a stop."""
        return self.count(self.total(self.config))

    @cached_property
    def policy(self) -> "EnginePolicy":
        """The engine as a TorchRL policy, with the environment that it acts in."""
        from torchgrpo.rollout.env import EnginePolicy, GroupEnv

        collector, config = self.collector, self.config
        env = GroupEnv(
            collector.loop,
            collector.generation,
            collector.prompts,
            config.prompts_per_iteration,
            self.keep_group,
            config.policy.filter_attempts,
        )
        return EnginePolicy(env, self.monitor.live.stage)

    def collect(self) -> "Rollout":
        """One rollout of the environment. Engines that share the learner's GPUs sleep afterwards."""
        from torchgrpo.rollout.env import collect

        with self.monitor.timed("collect"):
            rollout = collect(self.policy.env, self.policy)
            self.collector.weights.rest_engines()
        return rollout
