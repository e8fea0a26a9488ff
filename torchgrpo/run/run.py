"""A training run: what both schedules share, from the groups that they hand over to checkpoints.

    schedule: groups ─▶ advantage ─▶ learn, once for every optimizer step ─▶ push_weights ─▶ done
                                                                                             ├─ evaluation, when due
                                                                                             └─ checkpoint, when due

`run/build.py` makes it, `run/jobs.py` ends it. The schedules are `run/lockstep.py` and `run/overlapped.py`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.run_folder.checkpoints import checkpoint_path, newest_checkpoint
from config.schema.config import Config
from config.schema.errors import ConfigError, RunError, RunOutcome
from torchgrpo.run.checkpoint_retention import is_better, told_of_model
from torchgrpo.run.checkpoint_writer import CheckpointWriter
from torchgrpo.run.report import ReportWriter
from torchgrpo.run.stop import Stop

if TYPE_CHECKING:  # torch costs seconds, which a wrong key on the command line should not wait for
    import torch
    from torch import Tensor

    from envs.group import Group
    from envs.judging.service import RewardService
    from envs.prompts import PromptQueue
    from envs.task import Example
    from torchgrpo.evaluation.evaluation import Evaluation
    from torchgrpo.monitoring.doctor.doctor import Doctor, Finding
    from torchgrpo.monitoring.monitor import Monitor
    from torchgrpo.plan.plan import Plan
    from torchgrpo.rollout.engine_loop import EngineLoop
    from torchgrpo.rollout.engines.sampler import SteppedEngine
    from torchgrpo.rollout.generate import Generation
    from torchgrpo.rollout.weights.push import Weights
    from torchgrpo.training.batch import Batch
    from torchgrpo.training.checkpoint import Saved
    from torchgrpo.training.learner import Learner


@dataclass
class Run:
    """Learner, engines, prompts, rewards and monitor of one run, and what is done with them.

    generator: chooses the groups of each optimizer step. groups: of the batch at hand, by their id.
    outstanding: examples that were drawn and that no batch has taken. stale: groups found too old since the last call.
    leaving: this iteration is the last, for a stop was requested before its checkpoint.
    evaluated: the evaluation that was due last has been done, or none was.
    alarms: that the doctor has raised and that `train.on_alarm` has not been done for.
    """

    config: Config
    run_dir: Path
    plan: "Plan"
    learner: "Learner"
    weights: "Weights"
    engine: "SteppedEngine"
    loop: "EngineLoop"
    generation: "Generation"
    prompts: "PromptQueue"
    rewards: "RewardService"
    evaluation: "Evaluation"
    monitor: "Monitor"
    doctor: "Doctor"
    checkpoints: CheckpointWriter
    generator: "torch.Generator"
    stop: Stop = field(default_factory=Stop)
    groups: "dict[int, Group]" = field(default_factory=dict)
    outstanding: "Callable[[], list[Example]]" = list
    stale: "Callable[[], list[Group]]" = list
    trained_at: int | None = None
    alarms: "list[Finding]" = field(default_factory=list)
    leaving: bool = False
    evaluated: bool = False
    first_iteration: int = 0
    last_iteration: int = 0

    def __post_init__(self) -> None:
        self.report = ReportWriter(self.run_dir, self.monitor.say)

    @property
    def wants(self) -> "Callable[[Group], bool]":
        """Which groups dynamic sampling keeps."""
        from torchgrpo.training.dynamic_sampling import wants

        return wants(self.config.policy)

    def count(self, total: int) -> Iterator[int]:
        """Iteration numbers from 1 (or after the resumed one), until the last or a stop."""
        self.last_iteration = total
        if not self.evaluated:  # nothing yet, or the one before the checkpoint was given up
            self.evaluate(self.first_iteration)
        self.leaving = self.stop.requested
        for iteration in range(self.first_iteration + 1, total + 1):
            if self.leaving:
                return
            self.monitor.iteration = iteration
            yield iteration

    def advantage(self, groups: "Sequence[Group]", trained_at: int | None = None) -> "Batch":
        """Groups as tensors, with their advantages and what else the objective reads.

        trained_at: the policy version that the age of their tokens is counted to, where it can be other than 0.
        """
        self.groups, self.trained_at = {group.group_id: group for group in groups}, trained_at
        with self.monitor.timed("optimize"):
            return self.learner.credit(groups, trained_at)

    def minibatches(self, batch: "Batch") -> "Iterator[Batch]":
        """The batch of each optimizer step: every group once an epoch."""
        from torchgrpo.training.minibatches import minibatches

        repeats, epochs = self.config.env.repeats, self.config.train.epochs
        return minibatches(batch, repeats, self.config.optim_batch_groups, epochs, self.generator)

    def learn(self, batch: "Batch") -> None:
        """One optimizer step, and its row of metrics; the first after a push compares engines and learner."""
        groups = [self.groups[group_id] for group_id in batch.group_ids]
        sampled = self._sampled_since_push(batch, groups)
        with self.monitor.timed("optimize"):
            report = self.learner.step(batch)
        self.monitor.note(self.prompts.source.metrics())
        row = self.monitor.optimized(
            batch, groups, report.metrics | self.rewards.metrics(), self.weights.version
        )
        self.monitor.learned(
            batch, groups, report.advantage, report.log_ratio, report.entropy, self.trained_at
        )
        self._look_at(row)
        if report.skipped:
            self.monitor.event("skipped")
            self.monitor.say(f"optimizer step {self.monitor.optimizer_step}: not finite, skipped")
        engine, ratio = batch.sample_log_prob, report.log_ratio.to(batch.sample_log_prob)
        pairs = {name: (engine[tokens], (engine + ratio)[tokens]) for name, tokens in sampled.items()}
        self._checked(lambda: self.weights.weight_check.compare_sampled(self.weights.version, pairs))

    def _sampled_since_push(self, batch: "Batch", groups: "Sequence[Group]") -> "Mapping[str, Tensor]":
        """Tokens that a step can compare engines by; where they are too few, fixed sequences are compared now."""
        from torchgrpo.training.batch import sampled_tokens

        if not self.weights.current:
            return {}
        # With dropout the step's own forward pass does not say what the weights give.
        dropout = self.config.train_model.lora.dropout
        sampled = {} if dropout else sampled_tokens(batch, groups, self.weights.version)
        if self.weights.weight_check.lacks({name: int(tokens.sum()) for name, tokens in sampled.items()}):
            self._checked(lambda: self.loop.call(self.weights.check))
        return sampled

    def _checked(self, check: "Callable[[], dict[str, float] | None]") -> None:
        """Do a weight check, note its metrics, and do with a mismatch what `train.on_mismatch` says.

        Raises:
            WeightMismatch: the run is to stop; the text names the checkpoint before it.
        """
        from torchgrpo.rollout.weights.weight_check import WeightMismatch

        try:
            self.monitor.note(check() or {})
        except WeightMismatch as error:
            if self.config.train.on_mismatch == "say":
                self.monitor.say(str(error))
                return
            newest = newest_checkpoint(self.run_dir)
            way_on = f"the checkpoint before it is {newest}" if newest else "there is no checkpoint before it"
            raise WeightMismatch(f"{error}. {way_on}; train.on_mismatch=say goes on all the same") from error

    def _look_at(self, row: "dict[str, Any]") -> None:
        """What the doctor finds in a new row is told; alarms count for `train.on_alarm`."""
        for finding in self.doctor.see(row):
            self.monitor.alarm(finding)
            if finding.severity == "alarm":
                self.alarms.append(finding)

    def push_weights(self) -> None:
        """Learner to engines; beside running generation the push happens between two engine steps."""
        with self.monitor.timed("push"):
            self._checked(lambda: self.loop.call(self._push))
            self.monitor.event("pushed", version=self.weights.version)

    def _push(self) -> dict[str, float]:
        """Send the weights and set the temperature of this part of the run; metrics of the weight check."""
        steps = self.config.total_optimizer_steps - self.config.optimizer_steps_per_iteration
        progress = self.learner.optimizer_steps / max(steps, 1)
        temperature = self.config.inference_model.temperature_at(progress)
        self.generation.sampling = replace(self.generation.sampling, temperature=temperature)
        self.weights.push()
        return self.weights.check_push()

    def done(self, iteration: int) -> None:
        """The ledger; evaluation and checkpoint where they are due; a printed sample now and then."""
        self.monitor.consumed(iteration, list(self.groups.values()), self.stale())
        self.evaluate(iteration)
        frequency = self.config.train.checkpoint_frequency
        on_alarm = self.config.train.on_alarm if self.alarms else "say"
        self.leaving = self.stop.requested or on_alarm == "stop"
        last = iteration == self.last_iteration or self.leaving
        metric = self.config.train.keep_best
        best = metric and self.evaluation_due(iteration) and is_better(self.run_dir, metric, iteration)
        due = best or (frequency and iteration % frequency == 0)
        if last or due or on_alarm == "checkpoint":
            self.checkpoint(iteration)
            self.leaving = self.leaving or self.stop.requested
            self.alarms = self.alarms if on_alarm == "stop" else []
        if last or self.leaving:
            self.checkpoints.wait()
        self.checkpoints.check()
        self._tell_of_groups_unwanted()
        every = self.config.logging.sample_frequency
        if every and (iteration % every == 0 or iteration == 1):
            *_, newest = self.groups.values()
            self.monitor.show(newest)

    def evaluation_due(self, iteration: int) -> bool:
        """Whether `eval.sets` are evaluated after this iteration."""
        return self.evaluation.due(iteration, self.last_iteration)

    def evaluate(self, iteration: int) -> None:
        from torchgrpo.run.evaluation import evaluate

        self.evaluated = not self.evaluation_due(iteration)
        if self.evaluated or self.stop.requested:
            return
        self._checked(lambda: self.loop.call(self.weights.check))
        found = evaluate(
            self.evaluation, self.monitor, iteration, self.weights.version, lambda: self.stop.requested
        )
        self.evaluated = found is not None
        if found is None:
            return
        row, tables = found
        for table in tables:
            self.monitor.say(table)
        self._look_at(row)
        self.report.renew()

    def checkpoint(self, iteration: int) -> None:
        """Begin to write all that a resumed run needs; with `train.async_checkpoint` the run goes on meanwhile."""
        from torchgrpo.training.checkpoint import random_state

        self.monitor.live.stage("checkpoint")
        state = {
            "iteration": iteration,
            "overlapped": self.plan.overlapped,
            "evaluated": self.evaluated,
            "learner": self.learner.numbers(),
            "policy_version": self.weights.version,
            "generator": self.generator.get_state(),
            "newest_prompts": self.monitor.repetition.state(),
            "random": random_state(),
            "config": asdict(self.config),
            **self.loop.call(self._prompt_state),
        }
        began = time.perf_counter()
        self.checkpoints.write(iteration, state, self.learner.save)
        path = checkpoint_path(self.run_dir, iteration)
        self.monitor.event("phase", name="checkpoint", seconds=time.perf_counter() - began)
        self.monitor.event("checkpoint", path=str(path))

    def _prompt_state(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts.state_dict(self.outstanding()),
            "next_group_id": self.prompts.next_group_id,
            "lowest_scores": dict(self.generation.lowest.seen),
        }

    def begin(self, saved: "Saved | None", told: list[str]) -> None:
        """Go on from a checkpoint, or start from the beginning, whatever an attempt that left none has written.

        told: what the user should know, in the log of the run.
        """
        place = self.plan.devices.learner_place
        if saved is None:
            self.monitor.file.begin()
            self.monitor.ledger.begin(after=-1)
            self.monitor.event("begun", overlapped=self.plan.overlapped, learner=place)
        else:
            told = [*told, *self.restore(saved)]
            self.monitor.ledger.begin(after=self.first_iteration)
            self.monitor.event("resumed", source=str(saved.path), learner=place)
        for line in told:
            self.monitor.say(line)

    def restore(self, saved: "Saved") -> list[str]:
        """Go on from a checkpoint; what the user should know of it.

        Raises:
            ConfigError: it is of another model or other data.
        """
        from torchgrpo.training.checkpoint import restore_random_state

        state = saved.state
        try:
            self.learner.load(saved.learner, state["learner"])
            changed = self.prompts.load_state_dict(state["prompts"])
        except ConfigError as error:
            raise ConfigError(f"train.resume={saved.path}: {error}") from error
        self.first_iteration = state["iteration"]
        self.evaluated = state["evaluated"]
        self.prompts.next_group_id = state["next_group_id"]
        self.generation.lowest.seen = dict(state["lowest_scores"])
        self.weights.version = state["policy_version"] - 1
        self.generator.set_state(state["generator"])
        self.monitor.repetition.load(state["newest_prompts"])
        restore_random_state(state["random"])
        told = self.monitor.file.continue_from(saved.run_dir, self.learner.optimizer_steps)
        self.monitor.resumed()
        self.doctor.remember(self.monitor.file.rows())
        return [*told, *changed, f"resumed from {saved.path} at iteration {self.first_iteration}"]

    def check(self) -> None:
        """The end of a run that nobody has interrupted.

        Raises:
            RunError: an alarm has ended it early, or no step taught anything.
        """
        early = self.monitor.iteration < self.last_iteration
        if early and self.alarms and self.config.train.on_alarm == "stop":
            lines = "\n".join(finding.line for finding in self.alarms)
            raise RunError(
                f"train.on_alarm=stop: an alarm has ended the run, with a checkpoint.\n{lines}\nTo go on all the same "
                f"(what has been said is not said again):\n  {self.stop.resume}"
            )
        self.doctor.check(self.monitor.optimizer_step)

    def close(self, outcome: RunOutcome) -> None:
        """End engines, reward workers and log, whatever the outcome; the last line names the model."""
        self.stop.uninstall()
        with ExitStack() as ending:  # from the last to the first, each even where another one fails
            ending.callback(self.stop.uninstall)
            ending.callback(self.report.finish)
            ending.callback(self.monitor.close, outcome)
            ending.callback(self.rewards.close)
            if self.generation.conversation is not None:
                ending.callback(self.generation.conversation.close)
            ending.callback(self.engine.close)
            ending.callback(self.learner.close)
            ending.callback(self.loop.close)
            if outcome == "finished":
                ending.callback(self.stop.closing)
            ending.callback(self._end_checkpoint)
        for line in told_of_model(self.config, self.run_dir):
            self.monitor.say(line)

    def _end_checkpoint(self) -> None:
        if self.checkpoints.writing is not None:
            self.monitor.say(f"{self.checkpoints.writing} is still being written; Ctrl-C gives it up")
        self.checkpoints.wait()

    def _tell_of_groups_unwanted(self) -> None:
        """Groups that the batch held and that nothing could be learned from, for reasons that the user can mend."""
        policy, total, wants = self.config.policy, len(self.groups), self.wants
        judged = [group for group in self.groups.values() if any(one.judged for one in group.verdicts)]
        outside = [group for group in judged if not wants(group)]
        if len(judged) < total:
            self.monitor.say(
                f"{total - len(judged)} of {total} groups hold no completion that could be judged, through no fault "
                f"of the model; this batch was trained on without them. The last error: {self.rewards.last_error}"
            )
        if outside:
            self.monitor.say(
                f"dynamic sampling: {len(outside)} of {total} groups lie outside policy.filter_range="
                f"{policy.filter_range} ({policy.filter_on}) even after policy.filter_attempts="
                f"{policy.filter_attempts} replacements each; this batch was trained on without them. Prompts of a "
                "fitting difficulty, a larger env.repeats, or env.oversample help"
            )
