"""The parts of grpo_async.py: engines go on generating while the learner optimises.

rollout thread     prompts ─▶ groups ─▶ buffer ─┐        rollout/stream.py says who waits for whom
                                 └─▶ scorers, where the reference has devices of its own
learner's thread                                └─▶ take ─▶ advantage ─▶ learn ─▶ push_weights, when due
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from config.schema.config import Config
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.run import Run

if TYPE_CHECKING:
    from envs.group import Group
    from torchgrpo.rollout.stream import Stream
    from torchgrpo.training.batch import Batch


class Overlapped:
    """A run in which no token is older than `train.max_policy_age` when it is trained on."""

    script = "grpo_async.py"
    other_script = "grpo.py"
    overlapped = True

    def __init__(self, run: Run) -> None:
        self.run = run
        self.stream = make_stream(run)
        run.outstanding, run.stale = self.stream.outstanding, self._take_stale

    def _take_stale(self) -> "list[Group]":
        stale = self.stream.take_stale()
        self.run.learner.drop_scores(stale)
        return stale

    @staticmethod
    def total(config: Config) -> int:
        """Batches that the learner takes in a whole run."""
        return config.total_iterations * (config.completions_per_iteration // config.optim_batch_size)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Engines generate beside the block; what fails there is raised in it."""
        with self.stream:
            yield

    def steps(self) -> Iterator[int]:
        """Numbers of the batches that the learner takes, until the last or a stop."""
        return self.run.count(self.total(self.run.config))

    def take(self) -> "list[Group]":
        """The next batch of finished groups, none too old."""
        monitor, stream = self.run.monitor, self.stream
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
        return groups

    def _show_gathered(self) -> None:
        buffer = self.stream.buffer
        self.run.monitor.live.stage("collect", buffer.gathered, buffer.batch_groups)

    def advantage(self, groups: "Sequence[Group]") -> "Batch":
        """The batch of these groups, with the age of every token."""
        return self.run.advantage(groups, trained_at=self.run.weights.version)

    def epochs(self) -> range:
        return range(self.run.config.train.epochs)

    def learn(self, batch: "Batch") -> None:
        self.run.learn(batch)

    def push_due(self, step: int) -> bool:
        return step % self.run.config.batches_per_version == 0

    def push_weights(self) -> None:
        """Requests in flight go on with the new weights; the buffer learns how old its groups are now."""
        self.run.push_weights()
        self.stream.buffer.pushed(self.run.weights.version)

    def done(self, step: int) -> None:
        """As `Run.done`; the last evaluation is one of the weights that training ends with."""
        last = step == self.run.last_iteration
        if last and self.run.evaluation_due(step) and not self.push_due(step) and not self.run.stop.requested:
            self.push_weights()
        self.run.done(step)


def make_stream(run: Run) -> "Stream":
    """Generation in a thread of its own, which starts when the stream is entered."""
    from torchgrpo.rollout.group_buffer import GroupBuffer
    from torchgrpo.rollout.stream import Stream

    config = run.config
    train, groups = config.train, config.optim_batch_groups
    buffer: GroupBuffer[Group] = GroupBuffer(
        batch_groups=groups,
        max_age=train.max_policy_age,
        batches_per_version=config.batches_per_version,
        capacity=train.buffer_groups or 2 * groups,
        keep_order=train.stale_groups == "wait",
        first_batch=run.first_iteration,
        version=run.weights.version + 1,  # of the push that comes before generation
    )
    in_flight = config.env.num_envs * len(run.plan.devices.engines)
    return Stream(
        run.loop,
        run.generation,
        run.prompts,
        buffer,
        in_flight,
        train.wait_timeout_s,
        run.wants,
        config.policy.filter_attempts,
        run.learner.begin_scoring,
    )


Schedule: TypeAlias = Lockstep | Overlapped
"""What a script's loop works with, and what it calls itself."""
ScheduleType = TypeVar("ScheduleType", bound=Schedule)
