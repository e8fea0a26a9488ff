"""The schedule of grpo_async.py: engines go on generating while the learner optimises.

rollout thread     prompts ─▶ groups ─▶ buffer ─┐        rollout/stream.py says who waits for whom
                                 └─▶ scorers, where the reference has devices of its own
learner's thread                                └─▶ take ─▶ advantage ─▶ learn ─▶ push_weights, when due
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from config.schema.config import Config
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.training_run import Run

if TYPE_CHECKING:
    from envs.group import Group
    from envs.task import Example
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.rollout.stream import Stream


class Overlapped(Run):
    """A run in which no token is older than `train.max_policy_age` when it is trained on."""

    script = "grpo_async.py"
    other_script = "grpo.py"
    overlapped = True

    @staticmethod
    def total(config: Config) -> int:
        """Batches that the learner takes in a whole run."""
        return config.total_iterations * (config.completions_per_iteration // config.optim_batch_size)

    def steps(self) -> Iterator[int]:
        """Numbers of the batches that the learner takes, until the last or a stop."""
        return self.count(self.total(self.config))

    @cached_property
    def stream(self) -> "Stream":
        """Generation in a thread of its own, which starts when the stream is entered."""
        from torchgrpo.rollout.group_buffer import GroupBuffer
        from torchgrpo.rollout.stream import Stream

        config, collector = self.config, self.collector
        train, groups = config.train, config.optim_batch_groups
        buffer: GroupBuffer[Group] = GroupBuffer(
            batch_groups=groups,
            max_age=train.max_policy_age,
            batches_per_version=config.batches_per_version,
            capacity=train.buffer_groups or 2 * groups,
            keep_order=train.stale_groups == "wait",
            first_batch=self.first_iteration,
            version=collector.weights.version + 1,  # of the push that comes before generation
        )
        return Stream(
            collector.loop,
            collector.generation,
            collector.prompts,
            buffer,
            config.env.num_envs * len(self.plan.devices.engines),
            train.wait_timeout_s,
            self.keep_group,
            config.policy.filter_attempts,
            self.learner.begin_scoring,
        )

    def outstanding(self) -> "list[Example]":
        return self.stream.outstanding()

    def take_stale(self) -> "list[Group]":
        stale = self.stream.take_stale()
        self.learner.drop_scores(stale)
        return stale

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Engines generate beside the block; what fails there is raised in it."""
        with self.stream:
            yield

    def take(self) -> "Rollout":
        """The next batch of finished groups, none too old, with the age of every token."""
        from torchgrpo.batches.rollout import Rollout

        monitor, stream = self.monitor, self.stream
        with monitor.timed("collect"):
            groups = stream.take(meanwhile=self._show_gathered)
        monitor.note(
            {
                "idle/engines": stream.idle_share(),
                "groups/in_flight": float(stream.groups_in_flight),
                "groups/ready": float(stream.buffer.ready),
                "groups/dropped_stale": float(stream.buffer.dropped),
            }
        )
        with monitor.timed("optimize"):
            return Rollout.of(groups, trained_at=self.collector.weights.version)

    def _show_gathered(self) -> None:
        buffer = self.stream.buffer
        self.monitor.live.stage("collect", buffer.gathered, buffer.batch_groups)

    def epochs(self) -> range:
        return range(self.config.train.epochs)

    def push_due(self, step: int) -> bool:
        return step % self.config.batches_per_version == 0

    def push_weights(self) -> None:
        """Requests in flight go on with the new weights; the buffer learns how old its groups are now."""
        stream = self.stream  # made before the first push, whose version it knows
        super().push_weights()
        stream.buffer.pushed(self.collector.weights.version)

    def done(self, step: int, rollout: "Rollout") -> None:
        """As `Run.done`; the last evaluation is one of the weights that training ends with."""
        evaluated = step == self.last_iteration and bool(self.config.eval.sets)
        if evaluated and not self.push_due(step) and not self.stop.requested:
            self.push_weights()
        super().done(step, rollout)


Schedule: TypeAlias = Lockstep | Overlapped
"""The run that a script's loop works with."""
ScheduleType = TypeVar("ScheduleType", bound=Schedule)
