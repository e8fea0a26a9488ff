"""Callbacks of a run: evaluation, alarms of the doctor, checkpoints, reports, printed notices and samples.

Their base is `Callback` in training_run.py. An evaluation comes before the checkpoint that may be its best.
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
from torchgrpo.monitoring.doctor.doctor import Doctor, Finding
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.run.checkpoint_model import model_maker
from torchgrpo.run.checkpoint_retention import is_better
from torchgrpo.run.checkpoint_writer import CheckpointWriter
from torchgrpo.run.report_writer import ReportWriter
from torchgrpo.run.training_run import Callback, Run


def make_callbacks(config: Config, run_dir: Path, evaluation: Evaluation, monitor: Monitor) -> list[Callback]:
    """The callbacks of a run, in the order in which they are called."""
    evaluations, alarms = Evaluations(evaluation), Alarms(Doctor(config))
    writer = CheckpointWriter(run_dir, config.train, model_maker(config, monitor.say), monitor.say)
    reports = Reports(ReportWriter(run_dir, monitor.say))
    return [evaluations, alarms, Checkpoints(writer, evaluations, alarms), Notices(), reports]


@dataclass(eq=False)
class Evaluations(Callback):
    """Evaluates `eval.sets` where that is due. up_to_date: the evaluation that was due last is made, or none was."""

    evaluation: Evaluation
    up_to_date: bool = False

    def state(self) -> dict[str, Any]:
        return {"evaluated": self.up_to_date}

    def load(self, run: Run, state: dict[str, Any]) -> None:
        self.up_to_date = state["evaluated"]

    def on_start(self, run: Run) -> None:
        if not self.up_to_date:  # nothing yet, or the one before the checkpoint was given up
            self._evaluate(run, run.first_iteration)

    def on_iteration(self, run: Run, iteration: int, rollout: Rollout) -> None:
        self._evaluate(run, iteration)

    def _evaluate(self, run: Run, iteration: int) -> None:
        self.up_to_date = not self.evaluation.due(iteration, run.last_iteration)
        if self.up_to_date or run.stop.requested:
            return
        weights = run.collector.weights
        run.checked(lambda: run.collector.loop.call(weights.check))
        found = evaluate(self.evaluation, run.monitor, iteration, weights.version, lambda: run.stop.requested)
        self.up_to_date = found is not None
        if found is None:
            return
        row, tables = found
        for table in tables:
            run.monitor.say(table)
        for callback in run.callbacks:
            callback.on_evaluation(run, row)


@dataclass(eq=False)
class Alarms(Callback):
    """Says what the doctor finds in a new row. raised: alarms that `train.on_alarm` has not been done for."""

    doctor: Doctor
    raised: list[Finding] = field(default_factory=list)

    def load(self, run: Run, state: dict[str, Any]) -> None:
        self.doctor.remember(run.monitor.file.rows())

    def on_step(self, run: Run, row: dict[str, Any]) -> None:
        for finding in self.doctor.see(row):
            run.monitor.alarm(finding)
            if finding.severity == "alarm":
                self.raised.append(finding)

    def on_evaluation(self, run: Run, row: dict[str, Any]) -> None:
        self.on_step(run, row)

    def on_finish(self, run: Run) -> None:
        """Raises RunError: an alarm has ended the run early, or no step taught anything."""
        early = run.monitor.iteration < run.last_iteration
        if early and self.raised and run.config.train.on_alarm == "stop":
            lines = "\n".join(finding.line for finding in self.raised)
            raise RunError(
                f"train.on_alarm=stop: an alarm has ended the run, with a checkpoint.\n{lines}\nTo go on all the same "
                f"(what has been said is not said again):\n  {run.stop.resume}"
            )
        self.doctor.check(run.monitor.optimizer_step)


@dataclass(eq=False)
class Checkpoints(Callback):
    """Writes checkpoints: when due, after the best evaluation, on an alarm, and before the run ends."""

    writer: CheckpointWriter
    evaluations: Evaluations
    alarms: Alarms

    def on_iteration(self, run: Run, iteration: int, rollout: Rollout) -> None:
        train = run.config.train
        on_alarm = train.on_alarm if self.alarms.raised else "say"
        run.leaving = run.stop.requested or on_alarm == "stop"
        last = iteration == run.last_iteration or run.leaving
        evaluated = self.evaluations.evaluation.due(iteration, run.last_iteration)
        best = train.keep_best and evaluated and is_better(run.run_dir, train.keep_best, iteration)
        due = best or (train.checkpoint_frequency and iteration % train.checkpoint_frequency == 0)
        if last or due or on_alarm == "checkpoint":
            self.write(run, iteration)
            run.leaving = run.leaving or run.stop.requested
            self.alarms.raised = self.alarms.raised if on_alarm == "stop" else []
        if last or run.leaving:
            self.writer.wait()
        self.writer.check()

    def write(self, run: Run, iteration: int) -> None:
        """Begin to write all that a resumed run needs; with `train.async_checkpoint` the run goes on meanwhile."""
        run.monitor.live.stage("checkpoint")
        state = run.state(iteration)
        began = time.perf_counter()
        self.writer.write(iteration, state, run.learner.save)
        path = checkpoint_path(run.run_dir, iteration)
        run.monitor.event("phase", name="checkpoint", seconds=time.perf_counter() - began)
        run.monitor.event("checkpoint", path=str(path))

    def on_end(self, run: Run) -> None:
        if self.writer.writing is not None:
            run.monitor.say(f"{self.writer.writing} is still being written; Ctrl-C gives it up")
        self.writer.wait()


class Notices(Callback):
    """Says which groups nothing could be learned from, and shows a sample now and then."""

    def on_iteration(self, run: Run, iteration: int, rollout: Rollout) -> None:
        policy, total, keep_group = run.config.policy, len(rollout), run.keep_group
        judged = [group for group in rollout.groups if any(one.judged for one in group.verdicts)]
        if len(judged) < total:
            run.monitor.say(
                f"{total - len(judged)} of {total} groups hold no completion that could be judged, through no fault "
                "of the model; this batch was trained on without them. The last error: "
                f"{run.collector.rewards.last_error}"
            )
        outside = [group for group in judged if not keep_group(group)]
        if outside:
            run.monitor.say(
                f"dynamic sampling: {len(outside)} of {total} groups lie outside policy.filter_range="
                f"{policy.filter_range} ({policy.filter_on}) even after policy.filter_attempts="
                f"{policy.filter_attempts} replacements each; this batch was trained on without them. Prompts of a "
                "fitting difficulty, a larger env.repeats, or env.oversample help"
            )
        every = run.config.logging.sample_frequency
        if every and (iteration % every == 0 or iteration == 1):
            run.monitor.show(rollout.groups[-1])


@dataclass(eq=False)
class Reports(Callback):
    """Renews the run's report after evaluations, and makes it at the end."""

    writer: ReportWriter

    def on_evaluation(self, run: Run, row: dict[str, Any]) -> None:
        self.writer.renew()

    def on_close(self, run: Run) -> None:
        self.writer.finish()


def evaluate(
    evaluation: Evaluation, monitor: Monitor, iteration: int, version: int, stopped: Callable[[], bool]
) -> tuple[dict[str, Any], list[str]] | None:
    """Evaluate every set and log it: the row of metrics, and a table for each set. None if it was given up."""
    began = time.perf_counter()
    found = evaluation.run(iteration, stopped)
    if found is None:
        return None
    metrics, tables = found
    return monitor.evaluated(metrics, iteration, version, time.perf_counter() - began), tables
