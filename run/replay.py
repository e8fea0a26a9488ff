"""`run=replay step=N`: a recorded update computed again, from the ledger, and under another objective beside it.

    newest checkpoint before step N, or the initial weights
      ─▶ groups of the ledger ─▶ credit ─▶ step, as often as the run did ─▶ step N: its metrics against the recorded row

Nothing is written to the run's folder.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from config.checkpoints import checkpoints
from config.errors import ConfigError
from config.schema import Config
from envs.group import Group
from monitoring.events import read_events
from monitoring.metrics import rollout_metrics, without_clocks
from run.build import plan_run, prepare
from run.checkpoint_model import with_model
from run.lockstep import Lockstep
from run.overlapped import Overlapped
from run.recorded import Iteration, iteration_of_step, recorded_iterations, recorded_rows
from run.replay_report import Comparison, Objectives, differing_completions, first_difference, report
from run.replayed_objective import configs
from training.batch import Batch
from training.checkpoint import Saved, load_checkpoint, random_state, restore_random_state
from training.learner import StepReport
from training.local_learner import LocalLearner, make_learner
from training.minibatches import minibatches


@dataclass(frozen=True)
class Snapshot:
    """A learner between two of its acts, in a folder that is removed afterwards."""

    folder: Path
    numbers: dict[str, Any]
    random: dict[str, Any]

    @classmethod
    def of(cls, learner: LocalLearner, folder: Path) -> "Snapshot":
        learner.save(folder)()
        return cls(folder, learner.numbers(), random_state())

    def restore(self, learner: LocalLearner) -> None:
        learner.load(self.folder, self.numbers)
        restore_random_state(self.random)


@dataclass(frozen=True)
class Step:
    """One optimizer step that was computed again. groups: of its batch, in order. before: of the learner, at the start
    of its iteration and before the step, where they were asked for."""

    number: int
    iteration: Iteration
    batch: Batch
    groups: list[Group]
    report: StepReport
    before: tuple[Snapshot, Snapshot] | None

    def metrics(self, policy_version: int) -> dict[str, float]:
        return step_metrics(self.batch, self.groups, self.report, policy_version)


def replay(run_dir: Path, step: int | None, typed: list[str]) -> str:
    """What is to be printed of a step. typed: see `configs`.

    Raises:
        ConfigError: the ledger does not hold the step or what leads to it, or a setting cannot be another one.
    """
    if step is None:
        raise ConfigError("run=replay needs step=N, the number of an optimizer step")
    number = iteration_of_step(run_dir, step)
    recorded, changed = (config and with_model(config)[0] for config in configs(run_dir, typed))
    assert recorded is not None
    start, rows = start_before(run_dir, number), recorded_rows(run_dir)
    compared: list[Comparison] = []
    with tempfile.TemporaryDirectory() as scratch:
        steps = computed_again(run_dir, recorded, start, (number, step), Path(scratch), changed is not None)
        for last in steps:
            row = rows.get(last.number, {})
            replayed = last.metrics(int(row.get("policy_version", 0)))
            print(f"step {last.number} computed", file=sys.stderr)
            compared.append(Comparison(last.number, without_clocks(row), without_clocks(replayed)))
        other = None
        if changed is not None:
            assert last.before is not None
            metrics = under(changed, last, Path(scratch), int(rows.get(step, {}).get("policy_version", 0)))
            other = Objectives(recorded.policy, changed.policy, without_clocks(metrics))
    begun = "the initial weights" if start is None else start.path.name
    parted = differing_completions(step, last.iteration.records, last.batch, last.report)
    head = f"step {step} of {run_dir}, in iteration {number}; {len(compared)} steps computed from {begun}"
    return report(head, compared[-1], first_difference(compared), parted, other)


def start_before(run_dir: Path, iteration: int) -> Saved | None:
    """The newest readable checkpoint from before an iteration, of this run or one that it was resumed from."""
    resumed = [Path(event["source"]) for event in read_events(run_dir) if event["event"] == "resumed"]
    found: list[Saved] = []
    for path in [*checkpoints(run_dir), *resumed]:
        try:
            saved = Saved(path, load_checkpoint(path))
        except ConfigError:  # it was removed since, or is damaged: an earlier one does as well
            continue
        if saved.place[0] < iteration:
            found.append(saved)
    return max(found, key=lambda saved: saved.place[0], default=None)


def computed_again(
    run_dir: Path, config: Config, start: Saved | None, until: tuple[int, int], scratch: Path, keep: bool
) -> Iterator[Step]:
    """Every optimizer step from a checkpoint (None: the beginning) on.

    until: the last one, as its iteration and its number. keep: snapshots of the learner come with it.
    """
    last_iteration, last_step = until
    learner, generator = None, torch.Generator().manual_seed(config.train.seed)
    after = 0 if start is None else start.place[0]
    with ExitStack() as ends:
        for iteration in recorded_iterations(run_dir, after, last_iteration):
            if learner is None:
                learner = learner_for(config, iteration, scratch)
                ends.callback(learner.close)
                if start is not None:
                    learner.load(start.learner, start.state["learner"])
                    generator.set_state(start.state["generator"])
                    restore_random_state(start.state["random"])
            kept = keep and iteration.number == last_iteration
            first = Snapshot.of(learner, scratch / "iteration") if kept else None
            of_id = {group.group_id: group for group in iteration.groups}
            for batch in batches(learner, iteration, config, generator):
                number = learner.optimizer_steps + 1
                second = Snapshot.of(learner, scratch / "step") if first and number == last_step else None
                before = (first, second) if first and second else None
                groups = [of_id[group_id] for group_id in batch.group_ids]
                yield Step(number, iteration, batch, groups, learner.step(batch), before)
                if number == last_step:
                    return


def batches(
    learner: LocalLearner, iteration: Iteration, config: Config, generator: torch.Generator
) -> Iterator[Batch]:
    """The batch of each optimizer step of an iteration, as `run.run.Run.minibatches` makes them."""
    credited = learner.credit(iteration.groups, iteration.trained_at)
    return minibatches(
        credited, config.env.repeats, config.optim_batch_groups, config.train.epochs, generator
    )


def learner_for(config: Config, iteration: Iteration, scratch: Path) -> LocalLearner:
    """A learner as the run had it when it began, whichever script that was."""
    schedule = Lockstep if iteration.trained_at is None else Overlapped
    plan = plan_run(config, schedule, scratch)
    prepare(config, plan)
    return make_learner(config, plan, scratch)


def under(config: Config, step: Step, scratch: Path, policy_version: int) -> dict[str, float]:
    """The metrics of a step under another objective, on the weights that it was made on."""
    assert step.before is not None
    with closing(learner_for(config, step.iteration, scratch)) as learner:
        at_iteration, at_step = step.before
        at_iteration.restore(learner)
        groups = step.iteration.groups
        if config.policy.teacher_prompt is None:
            groups = [replace(group, teacher_prompt=()) for group in groups]
        credited = learner.credit(groups, step.iteration.trained_at)
        at_step.restore(learner)
        ids = credited.group_id[:, 0]
        rows = torch.cat([(ids == group.group_id).nonzero()[:, 0] for group in step.groups])
        batch = credited[rows]
        return step_metrics(batch, step.groups, learner.step(batch), policy_version)


def step_metrics(
    batch: Batch, groups: list[Group], report: StepReport, policy_version: int
) -> dict[str, float]:
    """A row of metrics, less what only a run that goes on knows."""
    return rollout_metrics(batch, groups, policy_version) | report.metrics
