"""Run class of grpo_async.py, which takes batches and pushes weights while the engines keep generating.

rollout thread     prompts ─▶ groups ─▶ buffer ─┐        rollout/group_stream.py has the waiting rules
                                 └─▶ scorers, where the reference model has devices of its own
learner's thread                                └─▶ take_batch ─▶ advantage ─▶ learn ─▶ push_weights, when due
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from config.schema.config import Config
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.training_run import Run

if TYPE_CHECKING:
    from envs.group import Group
    from envs.task import Example
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.rollout.group_stream import GroupStream


class OverlappedRun(Run):
    """Training run in which no token is older than `train.max_policy_age` when it is trained on."""

    script = "grpo_async.py"
    other_script = "grpo.py"
    is_overlapped = True

    @staticmethod
    def total_iterations(config: Config) -> int:
        """Returns the number of batches of a complete run.

        A batch is an iteration of this schedule.
        """
        return config.total_iterations * (config.completions_per_iteration // config.optim_batch_size)

    def steps(self) -> Iterator[int]:
        """Yields batch numbers, until the last or a stop request."""
        return self.iterate_numbers(self.total_iterations(self.config))

    @cached_property
    def stream(self) -> "GroupStream":
        """Stream of groups from a rollout thread, which starts when the stream is entered."""
        from torchgrpo.rollout.group_buffer import GroupBuffer
        from torchgrpo.rollout.group_stream import GroupStream

        config, rollout_components = self.config, self.rollout_components
        train, groups = config.train, config.optim_batch_groups
        buffer: GroupBuffer[Group] = GroupBuffer(
            batch_groups=groups,
            max_age=train.max_policy_age,
            batches_per_version=config.batches_per_version,
            capacity=train.buffer_groups or 2 * groups,
            keep_order=train.stale_groups == "wait",
            first_batch=self.first_iteration,
            version=rollout_components.weight_pusher.version + 1,  # of the push that comes before generation
        )
        return GroupStream(
            rollout_components.loop,
            rollout_components.group_rollout,
            rollout_components.prompts,
            buffer,
            config.groups_in_flight * len(self.plan.devices.engines),
            train.wait_timeout_s,
            self.keep_group,
            config.policy.filter_attempts,
            self.learner.begin_scoring,
        )

    def outstanding_examples(self) -> "list[Example]":
        """Returns examples in flight or in the buffer."""
        return self.stream.outstanding_examples()

    def take_stale_groups(self) -> "list[Group]":
        """Returns groups dropped as too old since the last call, and drops their reference log-probs."""
        stale = self.stream.take_stale_groups()
        self.learner.drop_scores(stale)
        return stale

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Runs generation in a thread beside the block.

        An error of the thread is raised in the block.
        """
        with self.stream:
            yield

    def take_batch(self) -> "Rollout":
        """Waits for the next batch of finished groups, none older than allowed."""
        from torchgrpo.batches.rollout import Rollout

        monitor, stream = self.monitor, self.stream
        with monitor.time_phase("collect"):
            groups = stream.take_batch(on_wait=self._show_gathered_groups)
        monitor.add_metrics(
            {
                "idle/engines": stream.idle_share(),
                "groups/in_flight": float(stream.groups_in_flight),
                "groups/ready": float(stream.buffer.groups_ready),
                "groups/dropped_stale": float(stream.buffer.groups_dropped),
            }
        )
        if (player := self.rollout_components.group_rollout.player) is not None:
            monitor.add_metrics({"episodes/alive": float(player.num_alive)})
        with monitor.time_phase("optimize"):
            return Rollout.from_groups(groups, trained_at=self.rollout_components.weight_pusher.version)

    def _show_gathered_groups(self) -> None:
        buffer = self.stream.buffer
        self.monitor.progress.set_stage("collect", buffer.groups_gathered, buffer.batch_groups)

    def epochs(self) -> range:
        """Returns one number for each pass over a batch."""
        return range(self.config.train.epochs)

    def is_push_due(self, step: int) -> bool:
        """Whether the weights are pushed after this batch."""
        return step % self.config.batches_per_version == 0

    def push_weights(self) -> None:
        """Pushes the learner's weights to the engines and the new policy version to the buffer.

        Requests in flight continue with the new weights.
        """
        stream = self.stream  # built before the first push: its version is computed from the one before
        super().push_weights()
        stream.buffer.set_version(self.rollout_components.weight_pusher.version)

    def end_iteration(self, step: int, rollout: "Rollout") -> None:
        """Ends an iteration as `Run.end_iteration`; before the last evaluation the final weights are pushed."""
        has_evaluation = step == self.last_iteration and bool(self.config.eval.sets)
        if has_evaluation and not self.is_push_due(step) and not self.stop.is_requested:
            self.push_weights()
        super().end_iteration(step, rollout)


Schedule: TypeAlias = LockstepRun | OverlappedRun
"""Run that a script's training loop drives."""
ScheduleType = TypeVar("ScheduleType", bound=Schedule)
