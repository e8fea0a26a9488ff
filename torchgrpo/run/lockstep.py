"""What grpo.py works with: engines generate, then the learner optimises, in turn, in one thread."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from config.schema.config import Config
from torchgrpo.run.run import Run

if TYPE_CHECKING:
    from envs.group import Group
    from torchgrpo.training.batch import Batch


class Lockstep:
    """A run whose every batch is on-policy."""

    script = "grpo.py"
    other_script = "grpo_async.py"
    overlapped = False

    def __init__(self, run: Run) -> None:
        from torchgrpo.rollout.collect import Collector

        policy = run.config.policy
        self.run = run
        self.collector = Collector(
            run.loop, run.generation, run.prompts, run.wants, policy.filter_attempts, run.monitor.live.stage
        )

    @staticmethod
    def total(config: Config) -> int:
        return config.total_iterations

    def iterations(self) -> Iterator[int]:
        """Iteration numbers, until the last or a stop."""
        return self.run.count(self.total(self.run.config))

    def collect(self) -> "list[Group]":
        """The groups of one iteration. Engines that share the learner's GPUs sleep afterwards."""
        with self.run.monitor.timed("collect"):
            groups = self.collector.collect(self.run.config.prompts_per_iteration)
            self.run.weights.rest_engines()
        return groups

    def advantage(self, groups: "Sequence[Group]") -> "Batch":
        return self.run.advantage(groups)

    def minibatches(self, batch: "Batch") -> "Iterator[Batch]":
        return self.run.minibatches(batch)

    def learn(self, minibatch: "Batch") -> None:
        self.run.learn(minibatch)

    def push_weights(self) -> None:
        self.run.push_weights()

    def done(self, iteration: int) -> None:
        self.run.done(iteration)
