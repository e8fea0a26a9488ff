"""The job `run=rehearse`: the learner's own code, without a device and without memory.

It is for this machine or the one that `plan.*` describes, and ends with 2 where the step would not fit.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from config.run_folder.folders import remove_if_unused
from config.schema.config import Config
from config.schema.errors import RunOutcome
from torchgrpo.run.checkpoint_model import with_model
from torchgrpo.run.overlapped import ScheduleType


def run_job(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None],
) -> RunOutcome:
    from torchgrpo.plan.machine import imagined_machine, this_machine
    from torchgrpo.plan.make_plan import make_plan
    from torchgrpo.plan.problems import model_limits, scorer_limits
    from torchgrpo.plan.report import advice
    from torchgrpo.run.rehearsal.report import report, too_large
    from torchgrpo.run.rehearsal.step import rehearse

    config, _ = with_model(config)
    machine = imagined_machine(config.plan, this_machine(run_dir))
    plan = make_plan(config, schedule.overlapped, machine, run_dir)
    remove_if_unused(run_dir)
    rehearsal = rehearse(plan)
    assert plan.shape is not None  # else there was no model to rehearse with
    print(report(plan, plan.shape, rehearsal), flush=True)
    found = [*model_limits(plan, plan.shape), *too_large(plan, rehearsal.peaks), *scorer_limits(plan)]
    if found:
        print(advice(plan, found, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"
