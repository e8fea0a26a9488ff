"""What a schedule works with: the parts of a run and the moves that grpo.py and grpo_async.py are made of.

    iterations ─▶ collect | take ─▶ learner ─▶ optimized ─▶ push_weights ─▶ iteration_done

Built by `grpo_utils.build`, closed by `grpo_utils.run`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
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
    from envs.prompts import PromptQueue
    from envs.turns import Conversation
    from evaluation.evaluation import Evaluation
    from monitoring.monitor import Monitor
    from monitoring.watch import Watch
    from plan.plan import Plan
    from rollout.collect import Wants
    from rollout.engines.sampler import Engine
    from rollout.generate import Generation
    from rollout.loop import EngineLoop
    from rollout.stream import Stream
    from run.engines import Weights
    from run.resume import Saved
    from training.learner import Learner, StepReport


@dataclass
class Parts:
    """Everything a schedule needs. Built by `build`, closed by `run`.

    plan: who lives where. Where it is overlapped, iterations count the learner's batches.
    groups: those of the present batch. members: the data sets of a mixture.
    leaving: this iteration is the last, for a stop was requested before its checkpoint.
    evaluated: the evaluation that was due last has been done, or none was.
    """

    config: Config
    run_dir: Path
    learner: "Learner"
    engine: "Engine"
    loop: "EngineLoop"
    generation: "Generation"
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
    conversation: "Conversation | None" = None
    members: tuple[str, ...] = ()
    groups: "list[Group]" = field(default_factory=list)
    stream: "Stream | None" = None
    evaluation: "Evaluation | None" = None

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
        from rollout.stream import Stream

        train, groups = self.config.train, self.config.optim_batch_groups
        buffer: GroupBuffer[Group] = GroupBuffer(
            batch_groups=groups,
            max_age=train.max_policy_age,
            batches_per_version=self.config.batches_per_version,
            capacity=train.buffer_groups or 2 * groups,
            keep_order=train.stale_groups == "wait",
            first_batch=self.first_iteration,
            version=self.weights.version,
        )
        in_flight = self.config.env.num_envs * len(self.plan.devices.engines)
        with Stream(
            self.loop,
            self.generation,
            self.prompts,
            buffer,
            in_flight,
            train.wait_timeout_s,
            self._wants(),
            self.config.policy.filter_attempts,
        ) as stream:
            self.stream = stream
            yield
        self.stream = None

    def _wants(self) -> "Wants | None":
        """Dynamic sampling, where it is asked for."""
        if not self.config.policy.dynamic_batching:
            return None
        from training.batch import collate

        return lambda group: bool(self.learner.wants(collate([group])))

    def collect(self) -> "TensorDictBase":
        """grpo.py: the groups of one iteration. Engines that share the learner's GPUs sleep afterwards."""
        from rollout.collect import Collector
        from training.batch import collate

        attempts = self.config.policy.filter_attempts
        collector = Collector(
            self.loop, self.generation, self.prompts, self._wants(), attempts, self.monitor.live.stage
        )
        self.groups = collector.collect(self.config.prompts_per_iteration)
        self.weights.rest_engines()
        return collate(self.groups, self.members)

    def take(self) -> "TensorDictBase":
        """grpo_async.py: the next batch of finished groups, none too old; adds age int64 [N, R]."""
        from training.batch import collate

        assert self.stream is not None, "take() belongs inside streaming()"
        stream = self.stream
        self.groups = stream.take(meanwhile=self._while_waiting)
        batch = collate(self.groups, self.members)
        batch["age"] = self.weights.version - batch["policy_version"]
        self.monitor.note(
            {
                "idle/engines": stream.idle_share(),
                "groups/in_flight": float(stream.groups_in_flight),
                "groups/ready": float(stream.buffer.ready),
                "groups/dropped_stale": float(stream.buffer.dropped),
            }
        )
        return batch

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
            self.monitor.note(self.loop.call(self._push))
            if self.stream is not None:
                self.stream.buffer.pushed(self.weights.version)
            self.pushed_at_step = self.learner.optimizer_steps

    def _push_if_requested(self) -> None:
        """The learner waits for groups, and a new engine for weights that only the learner has."""
        if not self.weights.requested.is_set():
            return
        self.weights.requested.clear()
        if self.learner.optimizer_steps == self.pushed_at_step:
            self.loop.call(self.weights.push_again)
        else:
            self.push_weights()  # between two pushes (weight_update_frequency): a version before its time

    def _push(self) -> Any:
        """What is generated from now on has the new weights and the temperature of this part of the run."""
        steps = self.config.total_optimizer_steps - self.config.optimizer_steps_per_iteration
        progress = self.learner.optimizer_steps / max(steps, 1)
        temperature = self.config.inference_model.temperature_at(progress)
        self.generation.sampling = replace(self.generation.sampling, temperature=temperature)
        return self.weights.push()

    def minibatches(self, batch: "TensorDictBase") -> Iterator["TensorDictBase"]:
        from training.minibatches import minibatches

        repeats, epochs = self.config.env.repeats, self.config.train.epochs
        return minibatches(batch, repeats, self.config.optim_batch_groups, epochs, self.generator)

    def optimized(self, batch: "TensorDictBase", report: "StepReport") -> None:
        """Log one optimizer step."""
        self.monitor.note({"prompts/left_out": float(self.prompts.source.left_out)})
        row = self.monitor.optimized(batch, report.metrics | self.rewards.metrics(), self.weights.version)
        for worry in self.watch.tell(row):
            self.monitor.say(worry)
        if report.skipped:
            self.monitor.say(f"optimizer step {self.monitor.optimizer_step}: not finite, skipped")

    def iteration_done(self, iteration: int, batch: "TensorDictBase") -> None:
        """A checkpoint when one is due, and a printed sample now and then."""
        self.evaluate(iteration)
        frequency = self.config.train.checkpoint_frequency
        self.leaving = self.stop.requested
        last = iteration == self.last_iteration or self.leaving
        if last or (frequency and iteration % frequency == 0):
            self.checkpoint(iteration)
            self.leaving = self.stop.requested
        self._tell_of_groups_unwanted(batch)
        every = self.config.logging.sample_frequency
        if every and (iteration % every == 0 or iteration == 1):
            from monitoring.samples import sample_text

            self.monitor.say(sample_text(self.monitor.optimizer_step, self.groups[-1]))

    def _tell_of_groups_unwanted(self, batch: "TensorDictBase") -> None:
        from training.batch import judged

        wanted, policy = self.learner.wants(batch), self.config.policy
        judgeable = judged(batch).view(len(wanted), -1).any(1)
        outside = ~wanted & judgeable
        if not judgeable.all():
            self.monitor.say(
                f"{int((~judgeable).sum())} of {len(wanted)} groups hold no completion that could be judged, through "
                f"no fault of the model; this batch was trained on without them. The last error: "
                f"{self.rewards.last_error}"
            )
        if outside.any():
            self.monitor.say(
                f"dynamic sampling: {int(outside.sum())} of {len(wanted)} groups lie outside policy.filter_range="
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
        from run.evaluation import evaluate

        self._push_if_requested()
        tables = evaluate(
            self.evaluation, self.monitor, iteration, self.engine.policy_version, self._given_up
        )
        self.evaluated = bool(tables)
        for table in tables:
            self.monitor.say(table)

    def _given_up(self) -> bool:
        return self.stop.requested

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
            **self.loop.call(self._prompt_state),
        }
        save_checkpoint(checkpoint_path(self.run_dir, iteration), state, self.config.train.keep_checkpoints)

    def _prompt_state(self) -> dict[str, Any]:
        outstanding = self.stream.outstanding() if self.stream is not None else []
        return {
            "prompts": self.prompts.state_dict(outstanding),
            "next_group_id": self.prompts.next_group_id,
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
        self.prompts.next_group_id = state["next_group_id"]
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
            ending.callback(self.engine.close)
            if self.conversation is not None:
                ending.callback(self.conversation.close)
            ending.callback(self.loop.close)
