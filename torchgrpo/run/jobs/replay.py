"""`run=replay step=N`: a recorded update computed again, from the ledger.

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

from config.cli.command_line import typed
from config.cli.saved_settings import METRICS, chosen_run, saved_config
from config.run_folder.checkpoints import checkpoints
from config.run_folder.folders import remove_if_unused
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.events import read_events
from torchgrpo.monitoring.metrics import rollout_metrics, without_clocks
from torchgrpo.monitoring.metrics_file import MetricsFile
from torchgrpo.run.build import plan_run, prepare
from torchgrpo.run.checkpoint_model import with_model
from torchgrpo.run.job import Job
from torchgrpo.run.ledger_iterations import Iteration, iteration_of_step, recorded_iterations
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped
from torchgrpo.training.checkpoint import Saved, load_checkpoint, restore_random_state
from torchgrpo.training.learner import make_learner
from torchgrpo.training.minibatches import minibatches
from torchgrpo.training.step_report import StepReport


def run(job: Job[Any]) -> RunOutcome:
    remove_if_unused(job.run_dir)
    print(replay(chosen_run(job.config.run_dir), job.config.step, typed()), flush=True)
    return "finished"


OF_THE_COMMAND = ("run", "run_dir", "step", "logging", "hydra")
WHERE = ("device", "model.name", "train_model.num_threads")
"""Settings of the machine, which may be others than the run's."""
ONE_RANK = ("num_devices=1", "num_nodes=1", "shard_size=null", "devices=null")
NO_SCORERS = ("num_devices=null", "shard_size=null", "devices=null")
"""Of `ref_model`: the reference scores in this process."""
MOST = 8
"""Completions that are named."""


@dataclass(frozen=True)
class Step:
    """One optimizer step that was computed again, on these groups."""

    number: int
    iteration: Iteration
    rollout: Rollout
    report: StepReport

    def metrics(self, policy_version: int) -> dict[str, float]:
        """Compute the row of metrics, less what only a run that goes on knows."""
        return rollout_metrics(self.rollout, policy_version) | self.report.metrics


@dataclass(frozen=True)
class Comparison:
    """One optimizer step: its recorded row of metrics and the replayed one, without clocks."""

    step: int
    recorded: dict[str, Any]
    replayed: dict[str, float]

    @property
    def shared(self) -> list[str]:
        """Metrics that both have, less the version, which is taken over."""
        return [name for name in self.replayed if name in self.recorded and name != "policy_version"]

    @property
    def differing(self) -> list[str]:
        """Metrics whose bits differ."""
        return [name for name in self.shared if not _same(self.recorded[name], self.replayed[name])]


def replay(run_dir: Path, step: int | None, typed: list[str]) -> str:
    """Recompute a step and lay its metrics beside the recorded ones, as text. typed: see `replayed_config`.

    Raises:
        ConfigError: the ledger does not hold the step or what leads to it, or a setting cannot be another one.
    """
    if step is None:
        raise ConfigError("run=replay needs step=N, the number of an optimizer step")
    number = iteration_of_step(run_dir, step)
    config, _ = with_model(replayed_config(run_dir, typed))
    start, recorded = start_before(run_dir, number), MetricsFile(run_dir / METRICS).rows()
    rows = {row["optimizer_step"]: row for row in recorded if "reward/mean" in row}
    compared: list[Comparison] = []
    with tempfile.TemporaryDirectory() as scratch:
        for last in computed_again(run_dir, config, start, (number, step), Path(scratch)):
            row = rows.get(last.number, {})
            replayed = last.metrics(int(row.get("policy_version", 0)))
            print(f"step {last.number} computed", file=sys.stderr)
            compared.append(Comparison(last.number, without_clocks(row), without_clocks(replayed)))
    begun = "the initial weights" if start is None else start.path.name
    found = compared[-1]
    lines = [
        f"step {step} of {run_dir}, in iteration {number}; {len(compared)} steps computed from {begun}",
        "",
        _row("metric", "recorded", "replayed", "difference"),
    ]
    for name in found.shared:
        before, now = found.recorded[name], found.replayed[name]
        lines.append(
            _row(name, f"{before:.9g}", f"{now:.9g}", "" if _same(before, now) else f"{now - before:+.3g}")
        )
    lines += ["", first_difference(compared)]
    completions = differing_advantages(last)
    lines += [f"  {line}" for line in completions[:MOST]]
    if len(completions) > MOST:
        lines.append(f"  and {len(completions) - MOST} more completions")
    return "\n".join(lines)


def replayed_config(run_dir: Path, typed: list[str]) -> Config:
    """Load the run's config, for a learner in this process.

    typed: overrides as on the command line, of which those of `WHERE` count.

    Raises:
        ConfigError: one of them is another setting; the message names it.
    """
    recorded = saved_config(run_dir)
    where = [f"train_model.{setting}" for setting in ONE_RANK] if recorded.train_model.ranks > 1 else []
    where += [f"ref_model.{setting}" for setting in NO_SCORERS] if recorded.ref_model.ranks else []
    for override in typed:
        key = override.lstrip("+").partition("=")[0]
        if key in WHERE:
            where.append(override.lstrip("+"))
        elif not key.startswith(OF_THE_COMMAND):
            raise ConfigError(
                f"run=replay {override}: the step is computed with the settings of its run; leave this one out. What "
                f"may differ: {', '.join(WHERE)}"
            )
    return saved_config(run_dir, where)


def first_difference(compared: list[Comparison]) -> str:
    if not all(each.recorded for each in compared):
        return "metrics.jsonl has no row of some of these steps: nothing to compare them with"
    for each in compared:
        if each.differing:
            name = each.differing[0]
            more = f" and {len(each.differing) - 1} more" if len(each.differing) > 1 else ""
            return (
                f"numbers part at step {each.step}: {name} was {each.recorded[name]!r} and is "
                f"{each.replayed[name]!r}{more}"
            )
    steps = f"all {len(compared)} steps" if len(compared) > 1 else "the step"
    return f"bit-identical: {len(compared[-1].shared)} metrics of {steps}"


def differing_advantages(step: Step) -> list[str]:
    """Name each completion of a step whose advantage is not the recorded one."""
    of_id = {record["group_id"]: record for record in step.iteration.records}
    numbers = [group.group_id for group in step.rollout.groups]
    chosen = [(group, one) for group in numbers for one in of_id[group]["completions"] if one["chosen"]]
    found = []
    for (group, one), advantage in zip(chosen, step.report.advantage, strict=True):
        recorded, values = one["advantage"], advantage.tolist()
        if not isinstance(recorded, list):
            told = "" if values[0] == recorded else f"advantage {recorded} -> {values[0]}"
        else:  # of each token, in the first step that trained on it
            first = of_id[group]["optimizer_steps"][0] == step.number
            told = "another advantage" if first and values[: len(recorded)] != recorded else ""
        if told:
            found.append(f"group {group}, completion {one['sample']}: {told}")
    return found


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _row(name: str, first: str, second: str, third: str) -> str:
    return f"{name:<32}{first:>17}{second:>17}{third:>13}".rstrip()


def start_before(run_dir: Path, iteration: int) -> Saved | None:
    """The newest readable checkpoint from before an iteration, of this run or one that it was resumed from."""
    resumed = [Path(event["source"]) for event in read_events(run_dir) if event["event"] == "resumed"]
    found: list[Saved] = []
    for path in [*checkpoints(run_dir), *resumed]:
        with suppress(ConfigError):  # it was removed since, or is damaged: an earlier one does as well
            saved = Saved(path, load_checkpoint(path))
            if saved.place[0] < iteration:
                found.append(saved)
    return max(found, key=lambda saved: saved.place[0], default=None)


def computed_again(
    run_dir: Path, config: Config, start: Saved | None, until: tuple[int, int], scratch: Path
) -> Iterator[Step]:
    """Compute every step after a checkpoint (None: from the beginning) to `until`, an iteration and a number."""
    last_iteration, last_step = until
    learner, generator = None, torch.Generator().manual_seed(config.train.seed)
    after = 0 if start is None else start.place[0]
    with ExitStack() as ends:
        for iteration in recorded_iterations(run_dir, after, last_iteration):
            if learner is None:
                # As the run had it when it began, whichever script that was.
                plan = plan_run(config, Lockstep if iteration.trained_at is None else Overlapped, scratch)
                prepare(config, plan)
                learner = make_learner(config, plan, scratch)
                ends.callback(learner.close)
                if start is not None:
                    learner.load(start.learner, start.state["learner"])
                    generator.set_state(start.state["generator"])
                    restore_random_state(start.state["random"])
            rollout = learner.credit(Rollout.of(iteration.groups, iteration.trained_at))
            for minibatch in minibatches(rollout, config.optim_batch_groups, config.train.epochs, generator):
                number = learner.optimizer_steps + 1
                yield Step(number, iteration, minibatch, learner.step(minibatch.batch))
                if number == last_step:
                    return
