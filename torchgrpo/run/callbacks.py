"""Run callbacks that start evaluations, diagnostics, checkpoints and reports, and print notices and samples.

Their base is `Callback` in training_run.py. An evaluation comes before the checkpoint that may become the best.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.run_folder.checkpoints import checkpoint_path
from config.schema.config import Config
from config.schema.errors import RunError
from torchgrpo.batches.rollout import Rollout
from torchgrpo.evaluation.evaluation import Evaluation
from torchgrpo.monitoring.diagnostics.diagnostics import Diagnostics, Finding
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.run.checkpoint_model import make_model_exporter
from torchgrpo.run.checkpoint_retention import is_best_evaluation
from torchgrpo.run.checkpoint_writer import CheckpointWriter
from torchgrpo.run.report_writer import ReportWriter
from torchgrpo.run.training_run import Callback, Run


def make_callbacks(config: Config, run_dir: Path, evaluation: Evaluation, monitor: Monitor) -> list[Callback]:
    """Returns the callbacks of a run, in calling order."""
    evaluations, alarms = EvaluationCallback(evaluation), AlarmCallback(Diagnostics(config))
    writer = CheckpointWriter(run_dir, config.train, make_model_exporter(config, monitor.log), monitor.log)
    reports = ReportCallback(ReportWriter(run_dir, monitor.log))
    return [evaluations, alarms, CheckpointCallback(writer, evaluations, alarms), NoticeCallback(), reports]


@dataclass(eq=False)
class EvaluationCallback(Callback):
    """Evaluates `eval.sets` where an evaluation is due. up_to_date: no evaluation that was due is missing."""

    evaluation: Evaluation
    up_to_date: bool = False

    def state(self) -> dict[str, Any]:
        return {"evaluated": self.up_to_date}

    def load(self, run: Run, state: dict[str, Any]) -> None:
        self.up_to_date = state["evaluated"]

    def on_start(self, run: Run) -> None:
        if not self.up_to_date:  # a new run, or an evaluation before the checkpoint was interrupted
            self._evaluate(run, run.first_iteration)

    def on_iteration(self, run: Run, iteration: int, rollout: Rollout) -> None:
        self._evaluate(run, iteration)

    def _evaluate(self, run: Run, iteration: int) -> None:
        self.up_to_date = not self.evaluation.is_due(iteration, run.last_iteration)
        if self.up_to_date or run.stop.is_requested:
            return
        weight_pusher = run.rollout_components.weight_pusher
        run.run_weight_check(lambda: run.rollout_components.loop.call(weight_pusher.check))
        result = evaluate(self.evaluation, run.monitor, iteration, weight_pusher.version, lambda: run.stop.is_requested)
        self.up_to_date = result is not None
        if result is None:
            return
        row, tables = result
        for table in tables:
            run.monitor.log(table)
        for callback in run.callbacks:
            callback.on_evaluation(run, row)


@dataclass(eq=False)
class AlarmCallback(Callback):
    """Runs the diagnostics on every new row of metrics and logs the findings.

    pending_alarms: alarms for which `train.on_alarm` has not been carried out yet.
    """

    diagnostics: Diagnostics
    pending_alarms: list[Finding] = field(default_factory=list)

    def load(self, run: Run, state: dict[str, Any]) -> None:
        self.diagnostics.add_past_rows(run.monitor.metrics_file.read_rows())

    def on_step(self, run: Run, row: dict[str, Any]) -> None:
        for finding in self.diagnostics.check_row(row):
            run.monitor.log_finding(finding)
            if finding.severity == "alarm":
                self.pending_alarms.append(finding)

    def on_evaluation(self, run: Run, row: dict[str, Any]) -> None:
        self.on_step(run, row)

    def on_finish(self, run: Run) -> None:
        """Fails a run that an alarm ended early, or that never had a gradient.

        Raises:
            RunError: one of these is so.
        """
        early = run.monitor.iteration < run.last_iteration
        if early and self.pending_alarms and run.config.train.on_alarm == "stop":
            lines = "\n".join(finding.line for finding in self.pending_alarms)
            raise RunError(
                f"train.on_alarm=stop: an alarm ended the run after writing a checkpoint.\n{lines}\nTo resume "
                f"anyway (the same alarm is not raised again):\n  {run.stop.resume}"
            )
        self.diagnostics.check_gradients(run.monitor.optimizer_step)


@dataclass(eq=False)
class CheckpointCallback(Callback):
    """Writes checkpoints when due, after the best evaluation, on an alarm, and at the end."""

    writer: CheckpointWriter
    evaluations: EvaluationCallback
    alarms: AlarmCallback

    def on_iteration(self, run: Run, iteration: int, rollout: Rollout) -> None:
        train = run.config.train
        on_alarm = train.on_alarm if self.alarms.pending_alarms else "log"
        run.is_ending = run.stop.is_requested or on_alarm == "stop"
        last = iteration == run.last_iteration or run.is_ending
        has_evaluation = self.evaluations.evaluation.is_due(iteration, run.last_iteration)
        best = train.keep_best and has_evaluation and is_best_evaluation(run.run_dir, train.keep_best, iteration)
        due = best or (train.checkpoint_frequency and iteration % train.checkpoint_frequency == 0)
        if last or due or on_alarm == "checkpoint":
            self.write(run, iteration)
            run.is_ending = run.is_ending or run.stop.is_requested
            self.alarms.pending_alarms = self.alarms.pending_alarms if on_alarm == "stop" else []
        if last or run.is_ending:
            self.writer.wait()
        self.writer.check()

    def write(self, run: Run, iteration: int) -> None:
        """Writes the checkpoint of an iteration; with `train.async_checkpoint` a thread finishes the writing."""
        run.monitor.progress.set_stage("checkpoint")
        state = run.state(iteration)
        began = time.perf_counter()
        self.writer.write(iteration, state, run.learner.save)
        path = checkpoint_path(run.run_dir, iteration)
        run.monitor.log_event("phase", name="checkpoint", seconds=time.perf_counter() - began)
        run.monitor.log_event("checkpoint", path=str(path))

    def on_end(self, run: Run) -> None:
        if self.writer.pending_checkpoint is not None:
            run.monitor.log(
                f"{self.writer.pending_checkpoint} is still being written; press Ctrl-C to abandon the checkpoint"
            )
        self.writer.wait()


class NoticeCallback(Callback):
    """Logs groups that were left out of training, and prints a sample at intervals."""

    def on_iteration(self, run: Run, iteration: int, rollout: Rollout) -> None:
        policy, total, keep_group = run.config.policy, len(rollout), run.keep_group
        scored = [group for group in rollout.groups if any(verdict.has_score for verdict in group.verdicts)]
        if len(scored) < total:
            run.monitor.log(
                f"{total - len(scored)} of {total} groups have no scored completion, because of errors and "
                "not of the model; this batch was trained on without those groups. Last error: "
                f"{run.rollout_components.last_error}"
            )
        outside = [group for group in scored if not keep_group(group)]
        if outside:
            run.monitor.log(
                f"policy.filter_range={policy.filter_range}: {len(outside)} of {total} groups lie outside the "
                f"range ({policy.filter_on}) after policy.filter_attempts={policy.filter_attempts} "
                "replacements each; this batch was trained on without those groups. Choose prompts of "
                "suitable difficulty, raise env.repeats, or set env.oversample"
            )
        every = run.config.logging.sample_frequency
        if every and (iteration % every == 0 or iteration == 1):
            run.monitor.log_sample(rollout.groups[-1])


@dataclass(eq=False)
class ReportCallback(Callback):
    """Updates the run's report after evaluations, and writes the final one at the end."""

    writer: ReportWriter

    def on_evaluation(self, run: Run, row: dict[str, Any]) -> None:
        self.writer.renew()

    def on_close(self, run: Run) -> None:
        self.writer.finish()


def evaluate(
    evaluation: Evaluation, monitor: Monitor, iteration: int, version: int, is_stopped: Callable[[], bool]
) -> tuple[dict[str, Any], list[str]] | None:
    """Evaluates every set and writes the row of metrics.

    Returns the row and a table for each set; None if the evaluation was interrupted.
    """
    began = time.perf_counter()
    result = evaluation.run(iteration, is_stopped)
    if result is None:
        return None
    metrics, tables = result
    return monitor.write_evaluation_row(metrics, iteration, version, time.perf_counter() - began), tables
