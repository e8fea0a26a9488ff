"""What grpo_async.py works with: engines go on generating while the learner optimises.

rollout thread     prompts ─▶ groups ─▶ buffer ─┐        rollout/stream.py says who waits for whom
learner's thread                                └─▶ take ─▶ advantage ─▶ learn ─▶ push_weights, when due
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from config.schema import Config
from run.run import Run

if TYPE_CHECKING:
    from envs.example import Example
    from envs.group import Group
    from rollout.stream import Stream


class Overlapped(Run):
    """A run in which no token is older than `train.max_policy_age` when it is trained on."""

    script = "grpo_async.py"
    other_script = "grpo.py"
    overlapped = True

    @staticmethod
    def total(config: Config) -> int:
        """Batches that the learner takes in a whole run."""
        return config.total_optimizer_batches

    @cached_property
    def stream(self) -> "Stream":
        """Generation in a thread of its own, which starts when the stream is entered."""
        from rollout.group_buffer import GroupBuffer
        from rollout.stream import Stream

        config = self.config
        train, groups = config.train, config.optim_batch_groups
        buffer: GroupBuffer[Group] = GroupBuffer(
            batch_groups=groups,
            max_age=train.max_policy_age,
            batches_per_version=config.batches_per_version,
            capacity=train.buffer_groups or 2 * groups,
            keep_order=train.stale_groups == "wait",
            first_batch=self.first_iteration,
        )
        return Stream(
            self.loop,
            self.rollouts,
            self.prompts,
            buffer,
            config.env.num_envs * len(self.plan.devices.engines),
            train.wait_timeout_s,
            self.wants,
            config.policy.filter_attempts,
        )

    def outstanding(self) -> "list[Example]":
        return self.stream.outstanding()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Engines generate beside the block; what fails there is raised in it."""
        with self.stream:
            yield

    def steps(self) -> Iterator[int]:
        """Numbers of the batches that the learner takes, until the last or a stop."""
        return self.count()

    def take(self) -> "list[Group]":
        """The next batch of finished groups, none too old."""
        stream = self.stream
        with self.monitor.timed("collect"):
            groups = stream.take(meanwhile=self._show_gathered)
        self.monitor.note(
            {
                "idle/engines": stream.idle_share(),
                "groups/in_flight": float(stream.groups_in_flight),
                "groups/ready": float(stream.buffer.ready),
                "groups/dropped_stale": float(stream.buffer.dropped),
            }
        )
        return groups

    def _show_gathered(self) -> None:
        buffer = self.stream.buffer
        self.monitor.live.stage("collect", buffer.gathered, buffer.batch_groups)

    def epochs(self) -> range:
        """How often the learner goes over a batch."""
        return range(self.config.train.epochs)

    def push_due(self, step: int) -> bool:
        return step % self.config.batches_per_version == 0

    def push_weights(self) -> None:
        """Requests in flight go on with the new weights; the buffer learns how old its groups are now."""
        super().push_weights()
        self.stream.buffer.pushed(self.weights.version)

    def done(self, step: int) -> None:
        """As `Run.done`; the last evaluation is one of the weights that training ends with."""
        last = step == self.last_iteration
        if last and self.evaluation_due(step) and not self.push_due(step) and not self.stop.requested:
            self.push_weights()
        super().done(step)
