"""Run class of grpo.py, which collects each rollout before the learner trains on that rollout."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from config.schema.config import Config
from torchgrpo.run.training_run import Run

if TYPE_CHECKING:
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.rollout.group_env import EnginePolicy


class LockstepRun(Run):
    """Training run whose every batch is on-policy."""

    script = "grpo.py"
    other_script = "grpo_async.py"
    is_overlapped = False

    @staticmethod
    def total_iterations(config: Config) -> int:
        """Returns the number of iterations of a complete run."""
        return config.total_iterations

    def iterations(self) -> Iterator[int]:
        """Yields iteration numbers, until the last or a stop request."""
        return self.iterate_numbers(self.total_iterations(self.config))

    @cached_property
    def policy(self) -> "EnginePolicy":
        """Engine as a TorchRL policy, with its environment `policy.env`."""
        from torchgrpo.rollout.group_env import EnginePolicy, GroupEnv

        rollout_components, config = self.rollout_components, self.config
        env = GroupEnv(
            rollout_components.loop,
            rollout_components.group_rollout,
            rollout_components.prompts,
            config.prompts_per_iteration,
            self.keep_group,
            config.policy.filter_attempts,
        )
        return EnginePolicy(env, self.monitor.progress.set_stage)

    def collect(self) -> "Rollout":
        """Samples and scores the groups of one iteration. Engines on the learner's GPUs sleep afterwards."""
        from torchgrpo.rollout.group_env import collect_rollout

        with self.monitor.time_phase("collect"):
            rollout = collect_rollout(self.policy.env, self.policy)
            self.rollout_components.weight_pusher.sleep_engines()
        return rollout
