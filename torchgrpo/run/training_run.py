"""A training run: what both schedules share, and the hooks of callbacks.

    rollout ─▶ advantage ─▶ learn, once for every optimizer step ─▶ push_weights ─▶ done
                              └─ on_step                                             └─ on_iteration

`run/build.py` makes it, `run/jobs/train.py` ends it. The schedules are `run/lockstep.py` and `run/overlapped.py`.
Callbacks (`run/callbacks.py`) evaluate, write checkpoints and reports, and say what the doctor finds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.run_folder.checkpoints import newest_checkpoint
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.run.checkpoint_retention import told_of_model
from torchgrpo.run.signals import Stop

if TYPE_CHECKING:  # torch costs seconds, which a wrong key on the command line should not wait for
    import torch
    from torch import Tensor

    from envs.group import Group
    from envs.task import Example
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.monitoring.monitor import Monitor
    from torchgrpo.plan.plan import Plan
    from torchgrpo.rollout.collector import Collector
    from torchgrpo.training.checkpoint import Saved
    from torchgrpo.training.learner import Learner


class Callback:
    """Hooks of a run. Each does nothing here."""

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return {}

    def load(self, run: "Run", state: dict[str, Any]) -> None:
        """The run goes on from a checkpoint of this state, all of it."""

    def on_start(self, run: "Run") -> None:
        """The weights are in the engines, and the first iteration has not begun."""

    def on_step(self, run: "Run", row: dict[str, Any]) -> None:
        """An optimizer step was made; its row of metrics is written."""

    def on_evaluation(self, run: "Run", row: dict[str, Any]) -> None:
        """The sets were evaluated; the row of metrics is written."""

    def on_iteration(self, run: "Run", iteration: int, rollout: "Rollout") -> None:
        """An iteration is over, its weights pushed where that was due."""

    def on_finish(self, run: "Run") -> None:
        """Training is over and nobody has interrupted it; a RunError raised here fails the run."""

    def on_end(self, run: "Run") -> None:
        """Training is over, whatever the outcome; learner and engines are still there."""

    def on_close(self, run: "Run") -> None:
        """Everything is closed, and the log is written."""


@dataclass(eq=False)
class Run:
    """Learner, collector and monitor of one run; callbacks do the rest.

    generator: chooses the groups of each optimizer step.
    leaving: this iteration is the last, for a stop was requested before its checkpoint.
    """

    config: Config
    run_dir: Path
    plan: "Plan"
    learner: "Learner"
    collector: "Collector"
    monitor: "Monitor"
    generator: "torch.Generator"
    callbacks: list[Callback] = field(default_factory=list)
    stop: Stop = field(default_factory=Stop)
    first_iteration: int = 0
    last_iteration: int = 0
    leaving: bool = False

    @property
    def keep_group(self) -> "Callable[[Group], bool]":
        """The predicate of groups that dynamic sampling keeps."""
        from torchgrpo.training.dynamic_sampling import group_filter

        return group_filter(self.config.policy)

    def outstanding(self) -> "list[Example]":
        """Examples that were drawn and that no batch has taken."""
        return []

    def take_stale(self) -> "list[Group]":
        """Groups found too old since the last call."""
        return []

    def count(self, total: int) -> Iterator[int]:
        """Iteration numbers from 1 (or after the resumed one), until the last or a stop."""
        self.last_iteration = total
        for callback in self.callbacks:
            callback.on_start(self)
        self.leaving = self.stop.requested
        for iteration in range(self.first_iteration + 1, total + 1):
            if self.leaving:
                return
            self.monitor.iteration = iteration
            yield iteration

    def advantage(self, rollout: "Rollout") -> None:
        """Fill in the advantages of a rollout, and what else the objective reads."""
        with self.monitor.timed("optimize"):
            self.learner.credit(rollout)

    def minibatches(self, rollout: "Rollout") -> "Iterator[Rollout]":
        """The groups of each optimizer step: every group once an epoch."""
        from torchgrpo.training.minibatches import minibatches

        return minibatches(rollout, self.config.optim_batch_groups, self.config.train.epochs, self.generator)

    def learn(self, rollout: "Rollout") -> None:
        """One optimizer step, and its row of metrics; the first after a push compares engines and learner."""
        batch, collector, monitor = rollout.batch, self.collector, self.monitor
        sampled = self._sampled_since_push(rollout)
        with monitor.timed("optimize"):
            report = self.learner.step(batch)
        monitor.note(collector.prompts.source.metrics())
        metrics = report.metrics | collector.rewards.metrics()
        row = monitor.optimized(rollout, metrics, collector.weights.version)
        monitor.learned(rollout, report.advantage, report.log_ratio, report.entropy)
        for callback in self.callbacks:
            callback.on_step(self, row)
        if report.skipped:
            monitor.event("skipped")
            monitor.say(f"optimizer step {monitor.optimizer_step}: not finite, skipped")
        engine, ratio = batch.sample_log_prob, report.log_ratio.to(batch.sample_log_prob)
        pairs = {name: (engine[tokens], (engine + ratio)[tokens]) for name, tokens in sampled.items()}
        weights = collector.weights
        self.checked(lambda: weights.weight_check.compare_sampled(weights.version, pairs))

    def _sampled_since_push(self, rollout: "Rollout") -> "dict[str, Tensor]":
        """Tokens that a step can compare engines by; where they are too few, fixed sequences are compared now."""
        weights = self.collector.weights
        if not weights.current:
            return {}
        # With dropout the step's own forward pass does not say what the weights give.
        dropout = self.config.train_model.lora.dropout
        sampled = {} if dropout else rollout.sampled_tokens(weights.version)
        if weights.weight_check.lacks({name: int(tokens.sum()) for name, tokens in sampled.items()}):
            self.checked(lambda: self.collector.loop.call(weights.check))
        return sampled

    def checked(self, check: "Callable[[], dict[str, float] | None]") -> None:
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

    def push_weights(self) -> None:
        """Learner to engines; beside running generation the push happens between two engine steps."""
        steps = self.config.total_optimizer_steps - self.config.optimizer_steps_per_iteration
        progress = self.learner.optimizer_steps / max(steps, 1)
        temperature, collector = self.config.inference_model.temperature_at(progress), self.collector
        with self.monitor.timed("push"):
            self.checked(lambda: collector.loop.call(lambda: collector.push(temperature)))
            self.monitor.event("pushed", version=collector.weights.version)

    def done(self, iteration: int, rollout: "Rollout") -> None:
        """The end of an iteration: its groups go to the ledger, and callbacks do what is due."""
        self.monitor.consumed(iteration, rollout.groups, self.take_stale())
        for callback in self.callbacks:
            callback.on_iteration(self, iteration, rollout)

    def state(self, iteration: int) -> dict[str, Any]:
        """What a checkpoint after this iteration holds beside the learner's tensors."""
        from torchgrpo.training.checkpoint import random_state

        collector = self.collector
        state = {
            "iteration": iteration,
            "overlapped": self.plan.overlapped,
            "learner": self.learner.numbers(),
            "generator": self.generator.get_state(),
            "newest_prompts": self.monitor.repetition.state(),
            "random": random_state(),
            "config": asdict(self.config),
            **collector.loop.call(lambda: collector.state(self.outstanding())),
        }
        for callback in self.callbacks:
            state |= callback.state()
        return state

    def begin(self, saved: "Saved | None", told: Sequence[str]) -> None:
        """Go on from a checkpoint, or start from the beginning, whatever an attempt that left none has written.

        told: what the user should know, in the log of the run.

        Raises:
            ConfigError: the checkpoint is of another model or other data.
        """
        place, monitor = self.plan.devices.learner_place, self.monitor
        if saved is None:
            monitor.file.begin()
            monitor.ledger.begin(after=-1)
            monitor.event("begun", overlapped=self.plan.overlapped, learner=place)
        else:
            told = [*told, *self._restore(saved)]
            monitor.ledger.begin(after=self.first_iteration)
            monitor.event("resumed", source=str(saved.path), learner=place)
        for line in told:
            monitor.say(line)

    def _restore(self, saved: "Saved") -> list[str]:
        from torchgrpo.training.checkpoint import restore_random_state

        state = saved.state
        try:
            self.learner.load(saved.learner, state["learner"])
            changed = self.collector.load(state)
        except ConfigError as error:
            raise ConfigError(f"train.resume={saved.path}: {error}") from error
        self.first_iteration = state["iteration"]
        self.generator.set_state(state["generator"])
        self.monitor.repetition.load(state["newest_prompts"])
        restore_random_state(state["random"])
        told = self.monitor.file.continue_from(saved.run_dir, self.learner.optimizer_steps)
        self.monitor.resumed()
        for callback in self.callbacks:
            callback.load(self, state)
        return [*told, *changed, f"resumed from {saved.path} at iteration {self.first_iteration}"]

    def close(self, outcome: RunOutcome) -> None:
        """End engines, reward workers and log, whatever the outcome; the last line names the model."""
        self.stop.uninstall()
        with ExitStack() as ending:  # from the last to the first, each even where another one fails
            ending.callback(self.stop.uninstall)
            for callback in self.callbacks:
                ending.callback(callback.on_close, self)
            ending.callback(self.monitor.close, outcome)
            ending.callback(self.collector.close)
            ending.callback(self.learner.close)
            ending.callback(self.collector.loop.close)
            if outcome == "finished":
                ending.callback(self.stop.closing)
            for callback in self.callbacks:
                ending.callback(callback.on_end, self)
        for line in told_of_model(self.config, self.run_dir):
            self.monitor.say(line)
