"""Base classes `Run` (steps, pushes, checkpoint state) and `Callback` (hooks) of training runs.

    rollout ─▶ advantage ─▶ learn, once for every optimizer step ─▶ push_weights ─▶ end_iteration
                              └─ on_step                                             └─ on_iteration

`run/build_run.py` builds a run, `run/jobs/train.py` ends it. The schedules are `run/lockstep_run.py` and
`run/overlapped_run.py`. Callbacks (`run/callbacks.py`) evaluate, write checkpoints and reports, and log diagnostics.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.run_folder.checkpoints import newest_checkpoint
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.run.checkpoint_retention import model_notices
from torchgrpo.run.stop_signals import StopRequest

if TYPE_CHECKING:  # torch is slow to import, and a wrong key on the command line should fail at once
    import torch
    from torch import Tensor

    from envs.group import Group
    from envs.task import Example
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.monitoring.monitor import Monitor
    from torchgrpo.plan.plan import Plan
    from torchgrpo.rollout.rollout_components import RolloutComponents
    from torchgrpo.training.checkpoint import Checkpoint
    from torchgrpo.training.learner import Learner


class Callback:
    """Hooks of a training run, which do nothing in this base class."""

    def state(self) -> dict[str, Any]:
        """Returns the fields that this callback adds to a checkpoint."""
        return {}

    def load(self, run: "Run", state: dict[str, Any]) -> None:
        """Called when the run resumes; state: that of the whole checkpoint."""

    def on_start(self, run: "Run") -> None:
        """Called after the first push of weights, before the first iteration."""

    def on_step(self, run: "Run", row: dict[str, Any]) -> None:
        """Called after an optimizer step, whose row of metrics has been written."""

    def on_evaluation(self, run: "Run", row: dict[str, Any]) -> None:
        """Called after an evaluation, whose row of metrics has been written."""

    def on_iteration(self, run: "Run", iteration: int, rollout: "Rollout") -> None:
        """Called at the end of an iteration, after the push of weights that was due."""

    def on_finish(self, run: "Run") -> None:
        """Called at the end of training that was not interrupted.

        A RunError raised here fails the run.
        """

    def on_end(self, run: "Run") -> None:
        """Called at the end of training, whatever the outcome, before learner and engines are closed."""

    def on_close(self, run: "Run") -> None:
        """Called when everything is closed and the log is written."""


@dataclass(eq=False)
class Run:
    """Training run: learner, rollout components, monitor and callbacks.

    generator: shuffles groups into minibatches.
    is_ending: this iteration is the last, because a stop was requested before its checkpoint.
    """

    config: Config
    run_dir: Path
    plan: "Plan"
    learner: "Learner"
    rollout_components: "RolloutComponents"
    monitor: "Monitor"
    generator: "torch.Generator"
    callbacks: list[Callback] = field(default_factory=list)
    stop: StopRequest = field(default_factory=StopRequest)
    first_iteration: int = 0
    last_iteration: int = 0
    is_ending: bool = False

    @property
    def keep_group(self) -> "Callable[[Group], bool]":
        """Predicate of the groups that dynamic sampling keeps."""
        from torchgrpo.training.dynamic_sampling import group_filter

        return group_filter(self.config.policy)

    def outstanding_examples(self) -> "list[Example]":
        """Returns sampled examples whose groups are in no batch yet."""
        return []

    def take_stale_groups(self) -> "list[Group]":
        """Returns groups dropped as too old since the last call."""
        return []

    def iterate_numbers(self, total: int) -> Iterator[int]:
        """Yields iteration numbers, until the last or a stop request.

        A new run starts at 1, a resumed run after the checkpoint's iteration.
        """
        self.last_iteration = total
        for callback in self.callbacks:
            callback.on_start(self)
        self.is_ending = self.stop.is_requested
        for iteration in range(self.first_iteration + 1, total + 1):
            if self.is_ending:
                return
            self.monitor.iteration = iteration
            yield iteration

    def advantage(self, rollout: "Rollout") -> None:
        """Computes the advantages of a rollout, its reference log-probs, and other inputs of the objective."""
        with self.monitor.time_phase("optimize"):
            self.learner.credit(rollout)

    def minibatches(self, rollout: "Rollout") -> "Iterator[Rollout]":
        """Yields the groups of each optimizer step; every group comes once per epoch."""
        from torchgrpo.training.minibatches import minibatches

        return minibatches(rollout, self.config.optim_batch_groups, self.config.train.epochs, self.generator)

    def learn(self, rollout: "Rollout") -> None:
        """Makes an optimizer step and writes its row of metrics.

        The first step after a push compares the log-probs of engines and learner.
        """
        batch, rollout_components, monitor = rollout.batch, self.rollout_components, self.monitor
        sampled = self._sampled_since_push(rollout)
        with monitor.time_phase("optimize"):
            report = self.learner.step(batch)
        monitor.add_metrics(rollout_components.prompts.source.metrics())
        metrics = report.metrics | report.speed_metrics | rollout_components.outcome_metrics()
        row = monitor.write_step_row(rollout, metrics, rollout_components.weight_pusher.version)
        monitor.record_token_values(rollout, report.advantage, report.log_ratio, report.entropy)
        for callback in self.callbacks:
            callback.on_step(self, row)
        if report.is_skipped:
            monitor.log_event("skipped_step")
            monitor.log(f"optimizer step {monitor.optimizer_step}: not finite, skipped")
        engine, ratio = batch.sample_log_prob, report.log_ratio.to(batch.sample_log_prob)
        pairs = {name: (engine[tokens], (engine + ratio)[tokens]) for name, tokens in sampled.items()}
        weight_pusher = rollout_components.weight_pusher
        self.run_weight_check(lambda: weight_pusher.weight_check.compare_sampled(weight_pusher.version, pairs))

    def _sampled_since_push(self, rollout: "Rollout") -> "dict[str, Tensor]":
        """Returns masks of the tokens that each engine sampled since the last push.

        Where these tokens are too few, the log-probs of fixed sequences are compared instead.
        """
        weight_pusher = self.rollout_components.weight_pusher
        if not weight_pusher.is_current:
            return {}
        # With dropout the log-probs of the step's forward pass differ from the engine's for equal weights.
        dropout = self.config.train_model.lora.dropout
        sampled = {} if dropout else rollout.sampled_masks_by_engine(weight_pusher.version)
        if weight_pusher.weight_check.needs_more_tokens({name: int(tokens.sum()) for name, tokens in sampled.items()}):
            self.run_weight_check(lambda: self.rollout_components.loop.call(weight_pusher.check))
        return sampled

    def run_weight_check(self, check: "Callable[[], dict[str, float] | None]") -> None:
        """Runs a weight check and logs its metrics; `train.on_mismatch` decides about a mismatch.

        Raises:
            WeightMismatch: the run has to stop; the message names the newest checkpoint.
        """
        from torchgrpo.rollout.weights.weight_check import WeightMismatch

        try:
            self.monitor.add_metrics(check() or {})
        except WeightMismatch as error:
            if self.config.train.on_mismatch == "log":
                self.monitor.log(str(error))
                return
            newest = newest_checkpoint(self.run_dir)
            way_on = f"the checkpoint before it is {newest}" if newest else "there is no checkpoint before it"
            raise WeightMismatch(f"{error}. {way_on}; set train.on_mismatch=log to continue anyway") from error

    def push_weights(self) -> None:
        """Pushes the learner's weights to the engines, between two engine steps where generation is running."""
        steps = self.config.total_optimizer_steps - self.config.optimizer_steps_per_iteration
        progress = self.learner.optimizer_steps / max(steps, 1)
        temperature, rollout_components = (
            self.config.inference_model.temperature_at(progress),
            self.rollout_components,
        )
        with self.monitor.time_phase("push"):
            self.run_weight_check(lambda: rollout_components.loop.call(lambda: rollout_components.push(temperature)))
            self.monitor.log_event("weight_push", version=rollout_components.weight_pusher.version)

    def end_iteration(self, iteration: int, rollout: "Rollout") -> None:
        """Ends an iteration: writes its groups to the ledger and calls the callbacks."""
        self.monitor.finish_iteration(iteration, rollout.groups, self.take_stale_groups())
        for callback in self.callbacks:
            callback.on_iteration(self, iteration, rollout)

    def state(self, iteration: int) -> dict[str, Any]:
        """Returns the state that a checkpoint after this iteration holds, without the learner's tensors."""
        from torchgrpo.training.checkpoint import random_state

        rollout_components = self.rollout_components
        state = {
            "iteration": iteration,
            "overlapped": self.plan.is_overlapped,
            "learner": self.learner.scalar_state(),
            "generator": self.generator.get_state(),
            "newest_prompts": self.monitor.repetition.state(),
            "random": random_state(),
            "config": asdict(self.config),
            **rollout_components.loop.call(lambda: rollout_components.state(self.outstanding_examples())),
        }
        for callback in self.callbacks:
            state |= callback.state()
        return state

    def begin(self, checkpoint: "Checkpoint | None", notices: Sequence[str]) -> None:
        """Resumes from a checkpoint, or starts from the beginning.

        Without a checkpoint, files of an earlier attempt in the folder are overwritten. notices: lines for the log.

        Raises:
            ConfigError: the checkpoint is of another model or other data.
        """
        slot, monitor = self.plan.devices.learner_devices, self.monitor
        if checkpoint is None:
            monitor.metrics_file.clear()
            monitor.ledger.truncate_after(-1)
            monitor.log_event("start", overlapped=self.plan.is_overlapped, learner=slot)
        else:
            notices = [*notices, *self._restore(checkpoint)]
            monitor.ledger.truncate_after(self.first_iteration)
            monitor.log_event("resume", source=str(checkpoint.path), learner=slot)
        for line in notices:
            monitor.log(line)

    def _restore(self, checkpoint: "Checkpoint") -> list[str]:
        """Loads the state of a checkpoint into all components, and returns notices for the log."""
        from torchgrpo.training.checkpoint import restore_random_state

        state = checkpoint.state
        try:
            self.learner.load(checkpoint.learner_folder, state["learner"])
            changed = self.rollout_components.load(state)
        except ConfigError as error:
            raise ConfigError(f"train.resume={checkpoint.path}: {error}") from error
        self.first_iteration = state["iteration"]
        self.generator.set_state(state["generator"])
        self.monitor.repetition.load(state["newest_prompts"])
        restore_random_state(state["random"])
        notices = self.monitor.metrics_file.copy_rows(checkpoint.run_dir, self.learner.optimizer_steps)
        self.monitor.load_totals()
        for callback in self.callbacks:
            callback.load(self, state)
        return [*notices, *changed, f"resumed from {checkpoint.path} at iteration {self.first_iteration}"]

    def close(self, outcome: RunOutcome) -> None:
        """Closes engines, reward workers and log, whatever the outcome.

        The last line of the log is the path of the model.
        """
        self.stop.uninstall()
        with ExitStack() as ending:  # runs in reverse order, each callback even after an error of another
            ending.callback(self.stop.uninstall)
            for callback in self.callbacks:
                ending.callback(callback.on_close, self)
            ending.callback(self.monitor.close, outcome)
            ending.callback(self.rollout_components.close)
            ending.callback(self.learner.close)
            ending.callback(self.rollout_components.loop.close)
            if outcome == "finished":
                ending.callback(self.stop.install_for_closing)
            for callback in self.callbacks:
                ending.callback(callback.on_end, self)
        for line in model_notices(self.config, self.run_dir):
            self.monitor.log(line)
