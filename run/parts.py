"""What a schedule works with: the parts of a run and the moves that grpo.py and grpo_async.py are made of.

    iterations ─▶ rollouts.collect | take ─▶ learner ─▶ optimized ─▶ push_weights ─▶ iteration_done

Built by `grpo_utils.build`, closed by `grpo_utils.run`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.errors import ConfigError
from config.outcome import RunOutcome
from config.schema import Config
from config.stop import Stop

if TYPE_CHECKING:  # torch costs seconds, which a wrong key on the command line should not wait for
    import torch
    from tensordict import TensorDictBase

    from envs.group import Group
    from envs.judging.service import RewardService
    from monitoring.monitor import Monitor
    from monitoring.watch import Watch
    from plan.plan import Plan
    from rollout.collector import Rollouts
    from rollout.streaming import PromptQueue, Stream
    from run.engines import Weights
    from run.evaluation import Evaluation
    from run.resume import Saved
    from training.batch import Batch
    from training.learner import Learner, StepReport


@dataclass
class Parts:
    """Everything a schedule needs. Built by `build`, closed by `run`.

    plan: who lives where. Where it is overlapped, iterations count the learner's batches.
    groups: those that the learner works on, by id. tensors: of them, for samples; goes with rollout/records.py.
    leaving: this iteration is the last, for a stop was requested before its checkpoint.
    evaluated: the evaluation that was due last has been done, or none was.
    """

    config: Config
    run_dir: Path
    learner: "Learner"
    rollouts: "Rollouts"
    weights: "Weights"
    prompts: "PromptQueue"
    rewards: "RewardService"
    monitor: "Monitor"
    watch: "Watch"
    generator: "torch.Generator"
    plan: "Plan"
    stop: Stop = field(default_factory=Stop)
    leaving: bool = False
    evaluated: bool = False
    first_iteration: int = 0
    last_iteration: int = 0
    pushed_at_step: int = 0
    stream: "Stream | None" = None
    evaluation: "Evaluation | None" = None
    groups: "dict[int, Group]" = field(default_factory=dict)
    tensors: "TensorDictBase | None" = None

    def iterations(self) -> Iterator[int]:
        """grpo.py: iteration numbers from 1 (or after the resumed one), until the last or a stop."""
        return self._count(self.config.total_iterations)

    def optimizer_batches(self) -> Iterator[int]:
        """grpo_async.py: numbers of the batches that the learner takes, likewise."""
        return self._count(self.config.total_optimizer_batches)

    def _count(self, total: int) -> Iterator[int]:
        self.last_iteration = total
        if not self.evaluated:  # nothing yet, or the one before the checkpoint was given up
            self.evaluate(self.first_iteration)
        self.leaving = self.stop.requested
        for iteration in range(self.first_iteration + 1, total + 1):
            if self.leaving:
                return
            yield iteration

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """grpo_async.py: generation runs beside the block, in a thread of its own."""
        from rollout.group_buffer import GroupBuffer
        from rollout.streaming import Stream
        from training.credit import wants

        train, groups = self.config.train, self.config.optim_batch_groups
        buffer: Any = GroupBuffer(
            batch_groups=groups,
            max_age=train.max_policy_age,
            batches_per_version=self.config.batches_per_version,
            capacity=train.buffer_groups or 2 * groups,
            keep_order=train.stale_groups == "wait",
            first_batch=self.first_iteration,
            version=self.weights.version,
        )
        in_flight = self.config.env.num_envs * len(self.plan.devices.engines)
        wanted = self.rollouts.records.keep(wants(self.config.policy))
        keep = wanted if self.config.policy.dynamic_batching else None
        with Stream(self.rollouts, self.prompts, buffer, in_flight, train.wait_timeout_s, keep) as stream:
            self.stream = stream
            yield
        self.stream = None

    def collect(self) -> "list[Group]":
        """grpo.py: the groups of one iteration. Engines that share the learner's GPUs sleep afterwards."""
        from training.credit import wants

        keep = self.rollouts.records.keep(wants(self.config.policy))
        collected = self.rollouts.collect(self.config.prompts_per_iteration, keep)
        self.weights.rest_engines()
        return self._recorded(collected)

    def _recorded(self, tensors: "TensorDictBase") -> "list[Group]":
        groups, self.tensors = self.rollouts.records.take(tensors), tensors
        self.groups = {group.group_id: group for group in groups}
        return groups

    def take(self) -> "list[Group]":
        """grpo_async.py: the next batch of finished groups, none too old."""
        assert self.stream is not None, "take() belongs inside streaming()"
        stream = self.stream
        batch = stream.take(meanwhile=self._while_waiting)
        self.monitor.note(
            {
                "idle/engines": stream.idle_share(),
                "groups/in_flight": float(stream.groups_in_flight),
                "groups/ready": float(stream.buffer.ready),
                "groups/dropped_stale": float(stream.buffer.dropped),
            }
        )
        return self._recorded(batch)

    def _while_waiting(self) -> None:
        self._push_if_requested()
        assert self.stream is not None
        buffer = self.stream.buffer
        self.monitor.live.stage("collect", buffer.gathered, buffer.batch_groups)

    def push_due(self, optimizer_batch: int) -> bool:
        return optimizer_batch % self.config.batches_per_version == 0

    def push_weights(self) -> None:
        """Learner to engines; beside running generation the push happens between two engine steps."""
        with self.monitor.timed("push"):
            if self.stream is None:
                self.monitor.note(self._push())
            else:
                self.monitor.note(self.stream.call(self._push))
                self.stream.buffer.pushed(self.weights.version)
            self.pushed_at_step = self.learner.optimizer_steps

    def _push_if_requested(self) -> None:
        """The learner waits for groups, and a new engine for weights that only the learner has."""
        if not self.weights.requested.is_set():
            return
        self.weights.requested.clear()
        assert self.stream is not None
        if self.learner.optimizer_steps == self.pushed_at_step:
            self.stream.call(self.weights.push_again)
        else:
            self.push_weights()  # between two pushes (weight_update_frequency): a version before its time

    def _push(self) -> Any:
        """What is generated from now on has the new weights and the temperature of this part of the run."""
        steps = self.config.total_optimizer_steps - self.config.optimizer_steps_per_iteration
        progress = self.learner.optimizer_steps / max(steps, 1)
        self.rollouts.policy.set_temperature(self.config.inference_model.temperature_at(progress))
        return self.weights.push()

    def minibatches(self, batch: "Batch") -> Iterator["Batch"]:
        from training.minibatches import minibatches

        repeats, epochs = self.config.env.repeats, self.config.train.epochs
        return minibatches(batch, repeats, self.config.optim_batch_groups, epochs, self.generator)

    def optimized(self, batch: "Batch", report: "StepReport") -> None:
        """Log one optimizer step."""
        self.monitor.note({"prompts/left_out": float(self.prompts.source.left_out)})
        groups = [self.groups[group_id] for group_id in batch.group_ids]
        said = report.metrics | self.rewards.metrics()
        row = self.monitor.optimized(batch, groups, said, self.weights.version)
        for worry in self.watch.tell(row):
            self.monitor.say(worry)
        if report.skipped:
            self.monitor.say(f"optimizer step {self.monitor.optimizer_step}: not finite, skipped")

    def iteration_done(self, iteration: int) -> None:
        """A checkpoint when one is due, and a printed sample now and then."""
        self.evaluate(iteration)
        frequency = self.config.train.checkpoint_frequency
        self.leaving = self.stop.requested
        last = iteration == self.last_iteration or self.leaving
        if last or (frequency and iteration % frequency == 0):
            self.checkpoint(iteration)
            self.leaving = self.stop.requested
        self._tell_of_groups_unwanted()
        every = self.config.logging.sample_frequency
        if every and (iteration % every == 0 or iteration == 1):
            self._show()

    def _show(self) -> None:
        from envs.attempts import attempts
        from monitoring.samples import sample_text

        assert self.tensors is not None
        env, group = self.rollouts.env, self.tensors[-self.config.env.repeats :]
        example = env.judged_examples[int(group["group_id"][0, 0])]
        found = list(attempts(example, group, env))
        self.monitor.say(sample_text(self.monitor.optimizer_step, example, found))

    def _tell_of_groups_unwanted(self) -> None:
        from training.credit import wants

        policy, groups = self.config.policy, list(self.groups.values())
        judgeable = [group for group in groups if any(verdict.judged for verdict in group.verdicts)]
        outside = len(judgeable) - sum(map(wants(policy), judgeable))
        lost = len(groups) - len(judgeable)
        if lost:
            self.monitor.say(
                f"{lost} of {len(groups)} groups hold no completion that could be judged, through "
                f"no fault of the model; this batch was trained on without them. The last error: "
                f"{self.rewards.last_error}"
            )
        if outside:
            self.monitor.say(
                f"dynamic sampling: {outside} of {len(groups)} groups lie outside policy.filter_range="
                f"{policy.filter_range} ({policy.filter_on}) even after policy.filter_attempts="
                f"{policy.filter_attempts} replacements each; this batch was trained on without them. Prompts of a "
                "fitting difficulty, a larger env.repeats, or env.oversample help"
            )

    def evaluate(self, iteration: int) -> None:
        """Run `eval.sets` when it is time; beside running generation, in slices between two engine steps."""
        self.evaluated = self.evaluation is None or not self.evaluation.due(iteration, self.last_iteration)
        if self.evaluation is None or self.evaluated or self.stop.requested:
            return
        if iteration == self.last_iteration and self.stream is not None and not self.push_due(iteration):
            self.push_weights()
        tables = self.evaluation.run(iteration, self._in_engine_thread, lambda: self.stop.requested)
        self.evaluated = bool(tables)
        for table in tables:
            self.monitor.say(table)

    def _in_engine_thread(self, function: Callable[[], Any]) -> Any:
        if self.stream is None:
            return function()
        self._push_if_requested()
        return self.stream.call(function)

    def checkpoint(self, iteration: int) -> None:
        from training.checkpoint import checkpoint_path, random_state, save_checkpoint

        self.monitor.live.stage("checkpoint")
        state = {
            "iteration": iteration,
            "overlapped": self.plan.overlapped,
            "evaluated": self.evaluated,
            "learner": self.learner.state_dict(),
            "policy_version": self.weights.version,
            "generator": self.generator.get_state(),
            "random": random_state(),
            "config": asdict(self.config),
            **(self._prompt_state() if self.stream is None else self.stream.call(self._prompt_state)),
        }
        save_checkpoint(checkpoint_path(self.run_dir, iteration), state, self.config.train.keep_checkpoints)

    def _prompt_state(self) -> dict[str, Any]:
        outstanding = self.stream.outstanding() if self.stream is not None else []
        return {
            "prompts": self.prompts.state_dict(outstanding),
            "next_group_id": self.rollouts.env.next_group_id,
        }

    def begin(self) -> list[str]:
        """Start from the beginning, whatever an attempt that left no checkpoint has written. Nothing to tell."""
        self.monitor.file.begin()
        return []

    def restore(self, saved: "Saved") -> list[str]:
        """Go on from a checkpoint; what the user should know of it.

        Raises:
            ConfigError: it is of another model or other data.
        """
        from training.checkpoint import restore_random_state

        state = saved.state
        try:
            self.learner.load_state_dict(state["learner"])
            self.prompts.load_state_dict(state["prompts"])
        except ConfigError as error:
            raise ConfigError(f"train.resume={saved.path}: {error}") from error
        self.first_iteration = state["iteration"]
        self.evaluated = state["evaluated"]
        self.rollouts.env.next_group_id = state["next_group_id"]
        self.weights.version = state["policy_version"] - 1
        self.generator.set_state(state["generator"])
        restore_random_state(state["random"])
        told = self.monitor.file.continue_from(saved.run_dir, self.learner.optimizer_steps)
        self.monitor.resumed()
        self.watch.remember(self.monitor.rows())
        return [*told, f"resumed from {saved.path} at iteration {self.first_iteration}"]

    def close(self, outcome: RunOutcome) -> None:
        self.stop.uninstall()
        with ExitStack() as ending:  # from the last to the first, each even where another one fails
            ending.callback(self.monitor.close, outcome)
            ending.callback(self.rewards.close)
            ending.callback(self.rollouts.policy.engine.close)
