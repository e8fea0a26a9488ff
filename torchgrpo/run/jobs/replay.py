"""Job `run=replay`: recomputes optimizer steps up to `replay.step` from the ledger, and compares metrics.

    newest checkpoint before step N, or the initial weights
      ─▶ groups of the ledger ─▶ credit ─▶ step, as often as the run did ─▶ step N: its metrics against the recorded row

Nothing is written to the run's folder.
"""

import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config.cli.command_line import typed_overrides
from config.cli.saved_settings import METRICS, chosen_run, saved_config
from config.run_folder.checkpoints import checkpoints
from config.run_folder.folders import remove_unused_folder
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.events import read_events
from torchgrpo.monitoring.ledger_record import token_values
from torchgrpo.monitoring.metrics import rollout_metrics, without_timings
from torchgrpo.monitoring.metrics_file import MetricsFile
from torchgrpo.run.build_run import plan_run, prepare
from torchgrpo.run.checkpoint_model import resolve_checkpoint_models
from torchgrpo.run.job import Job
from torchgrpo.run.ledger_iterations import RecordedIteration, find_iteration_of_step, read_iterations
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun
from torchgrpo.training.checkpoint import Checkpoint, load_checkpoint, restore_random_state
from torchgrpo.training.learner import make_learner
from torchgrpo.training.minibatches import minibatches
from torchgrpo.training.step_report import StepReport


def run(job: Job[Any]) -> RunOutcome:
    remove_unused_folder(job.run_dir)
    print(replay_report(chosen_run(job.config.run_dir), job.config.replay.step, typed_overrides()), flush=True)
    return "finished"


COMMAND_SETTINGS = ("run", "run_dir", "replay", "logging", "hydra")
MACHINE_SETTINGS = ("device", "model.name", "train_model.num_threads")
"""Settings of the machine, which may differ from the run's."""
SINGLE_RANK_OVERRIDES = ("num_devices=1", "num_nodes=1", "shard_size=null", "context_parallel=1", "devices=null")
NO_SCORER_OVERRIDES = ("num_devices=null", "shard_size=null", "devices=null")
"""Overrides of `ref_model` that place the reference model in this process."""
MAX_NAMED_COMPLETIONS = 8
"""Maximum of completions listed in the report."""


@dataclass(frozen=True)
class ReplayedStep:
    """Optimizer step that was recomputed, with its groups and its report."""

    number: int
    iteration: RecordedIteration
    rollout: Rollout
    report: StepReport

    def metrics(self, policy_version: int) -> dict[str, float]:
        """Returns the row of metrics, without those that only a running run can measure."""
        return rollout_metrics(self.rollout, policy_version) | self.report.metrics


@dataclass(frozen=True)
class StepComparison:
    """Recorded and replayed metrics of one optimizer step, without clocks."""

    step: int
    recorded_row: dict[str, Any]
    replayed_row: dict[str, float]

    @property
    def shared_metrics(self) -> list[str]:
        """Metrics of both rows, without the policy version, which is copied from the recorded row."""
        return [name for name in self.replayed_row if name in self.recorded_row and name != "policy_version"]

    @property
    def differing_metrics(self) -> list[str]:
        """Metrics whose bits differ."""
        return [name for name in self.shared_metrics if not _is_equal(self.recorded_row[name], self.replayed_row[name])]


def replay_report(run_dir: Path, step: int | None, typed_overrides: list[str]) -> str:
    """Recomputes an optimizer step, and compares its metrics with the recorded ones as text.

    typed_overrides: see `replayed_config`.

    Raises:
        ConfigError: the ledger lacks the step or an earlier one that it depends on, or an override is not allowed.
    """
    if step is None:
        raise ConfigError("run=replay needs replay.step=N, the number of an optimizer step")
    number = find_iteration_of_step(run_dir, step)
    config, _ = resolve_checkpoint_models(replayed_config(run_dir, typed_overrides))
    start, recorded = checkpoint_before(run_dir, number), MetricsFile(run_dir / METRICS).read_rows()
    rows = {row["optimizer_step"]: row for row in recorded if "reward/mean" in row}
    comparisons: list[StepComparison] = []
    with tempfile.TemporaryDirectory() as scratch:
        for last in replay_steps(run_dir, config, start, (number, step), Path(scratch)):
            row = rows.get(last.number, {})
            replayed = last.metrics(int(row.get("policy_version", 0)))
            print(f"step {last.number} computed", file=sys.stderr)
            comparisons.append(StepComparison(last.number, without_timings(row), without_timings(replayed)))
    origin = "the initial weights" if start is None else start.path.name
    comparison = comparisons[-1]
    lines = [
        f"step {step} of {run_dir}, in iteration {number}; {len(comparisons)} steps computed from {origin}",
        "",
        _row("metric", "recorded", "replayed", "difference"),
    ]
    for name in comparison.shared_metrics:
        before, now = comparison.recorded_row[name], comparison.replayed_row[name]
        lines.append(
            _row(name, f"{before:.9g}", f"{now:.9g}", "" if _is_equal(before, now) else f"{now - before:+.3g}")
        )
    lines += ["", first_difference(comparisons)]
    completions = changed_advantages(last)
    lines += [f"  {line}" for line in completions[:MAX_NAMED_COMPLETIONS]]
    if len(completions) > MAX_NAMED_COMPLETIONS:
        lines.append(f"  and {len(completions) - MAX_NAMED_COMPLETIONS} more completions")
    return "\n".join(lines)


def replayed_config(run_dir: Path, typed_overrides: list[str]) -> Config:
    """Loads the run's config, with changes that place the learner in this process.

    typed_overrides: those of the command line; only settings of `MACHINE_SETTINGS` are allowed.

    Raises:
        ConfigError: an override changes another setting; the message names it.
    """
    recorded = saved_config(run_dir)
    overrides = (
        [f"train_model.{setting}" for setting in SINGLE_RANK_OVERRIDES] if recorded.train_model.ranks > 1 else []
    )
    overrides += [f"ref_model.{setting}" for setting in NO_SCORER_OVERRIDES] if recorded.ref_model.ranks else []
    for override in typed_overrides:
        key = override.lstrip("+").partition("=")[0]
        if key in MACHINE_SETTINGS:
            overrides.append(override.lstrip("+"))
        elif not key.startswith(COMMAND_SETTINGS):
            raise ConfigError(
                f"run=replay {override}: the step is computed with the settings of its run; leave this "
                f"override out. Settings that may differ: {', '.join(MACHINE_SETTINGS)}"
            )
    return saved_config(run_dir, overrides)


def first_difference(comparisons: list[StepComparison]) -> str:
    """Returns a line about the first step whose metrics differ, or that all are bit-identical."""
    if not all(each.recorded_row for each in comparisons):
        return "metrics.jsonl has no rows for some of these steps, so they cannot be compared"
    for each in comparisons:
        if each.differing_metrics:
            name = each.differing_metrics[0]
            more = f" and {len(each.differing_metrics) - 1} more" if len(each.differing_metrics) > 1 else ""
            return (
                f"metrics differ from step {each.step} on: {name} was {each.recorded_row[name]!r} and is "
                f"{each.replayed_row[name]!r}{more}"
            )
    steps = f"all {len(comparisons)} steps" if len(comparisons) > 1 else "the step"
    return f"bit-identical: {len(comparisons[-1].shared_metrics)} metrics of {steps}"


def changed_advantages(step: ReplayedStep) -> list[str]:
    """Returns a line for each completion whose advantage differs from the recorded one."""
    records = {record["group_id"]: record for record in step.iteration.records}
    report = step.report
    values_of_groups = token_values(step.rollout, report.advantage, report.log_ratio, report.entropy)
    found = []
    for group, values in zip(step.rollout.groups, values_of_groups, strict=True):
        record = records[group.group_id]
        chosen = [completion for completion in record["completions"] if completion["chosen"]]
        for completion, advantage in zip(chosen, values.advantage, strict=True):
            recorded = completion["advantage"]
            if not isinstance(recorded, list):
                change = "" if advantage == recorded else f"advantage {recorded} -> {advantage}"
            else:  # advantages of tokens, recorded in the first step that trained on the completion
                first = record["optimizer_steps"][0] == step.number
                change = "another advantage" if first and advantage != recorded else ""
            if change:
                found.append(f"group {group.group_id}, completion {completion['sample']}: {change}")
    return found


def _is_equal(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _row(name: str, first: str, second: str, third: str) -> str:
    return f"{name:<32}{first:>17}{second:>17}{third:>13}".rstrip()


def checkpoint_before(run_dir: Path, iteration: int) -> Checkpoint | None:
    """Returns the newest readable checkpoint before an iteration; None where there is none.

    Checkpoints that this run was resumed from count.
    """
    resumed = [Path(event["source"]) for event in read_events(run_dir) if event["event"] == "resume"]
    found: list[Checkpoint] = []
    for path in [*checkpoints(run_dir), *resumed]:
        with suppress(ConfigError):  # a removed or damaged checkpoint: an earlier one serves as well
            checkpoint = Checkpoint(path, load_checkpoint(path))
            if checkpoint.counters[0] < iteration:
                found.append(checkpoint)
    return max(found, key=lambda checkpoint: checkpoint.counters[0], default=None)


def replay_steps(
    run_dir: Path, config: Config, start: Checkpoint | None, until: tuple[int, int], scratch: Path
) -> Iterator[ReplayedStep]:
    """Recomputes every optimizer step after a checkpoint, and yields each one.

    start: None starts from the initial weights. until: number of the last iteration, and of the last optimizer step.
    """
    last_iteration, last_step = until
    learner, generator = None, torch.Generator().manual_seed(config.train.seed)
    after = 0 if start is None else start.counters[0]
    with ExitStack() as ends:
        for iteration in read_iterations(run_dir, after, last_iteration):
            if learner is None:
                # Plan for the schedule of the script that made the run.
                plan = plan_run(config, LockstepRun if iteration.trained_at is None else OverlappedRun, scratch)
                prepare(config, plan)
                learner = make_learner(config, plan, scratch)
                ends.callback(learner.close)
                if start is not None:
                    learner.load(start.learner_folder, start.state["learner"])
                    generator.set_state(start.state["generator"])
                    restore_random_state(start.state["random"])
            rollout = learner.credit(Rollout.from_groups(iteration.groups, iteration.trained_at))
            for minibatch in minibatches(rollout, config.optim_batch_groups, config.train.epochs, generator):
                number = learner.optimizer_steps + 1
                yield ReplayedStep(number, iteration, minibatch, learner.step(minibatch.batch))
                if number == last_step:
                    return
