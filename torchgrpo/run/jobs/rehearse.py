"""The job `run=rehearse`: the learner's own code, without a device and without memory.

It is for this machine or the one that `plan.*` describes, and ends with 2 where the step would not fit.
"""

import sys
from typing import Any

from config.run_folder.folders import remove_if_unused
from config.schema.errors import RunOutcome
from torchgrpo.run.checkpoint_model import with_model
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    from torchgrpo.plan.machine import imagined_machine, this_machine
    from torchgrpo.plan.make_plan import make_plan
    from torchgrpo.plan.plan_text import advice
    from torchgrpo.plan.problems import model_limits, scorer_limits
    from torchgrpo.run.rehearsal.rehearsal_text import report, too_large
    from torchgrpo.run.rehearsal.step import rehearse

    config, _ = with_model(job.config)
    machine = imagined_machine(config.plan, this_machine(job.run_dir))
    plan = make_plan(config, job.schedule.overlapped, machine, job.run_dir)
    remove_if_unused(job.run_dir)
    rehearsal = rehearse(plan)
    assert plan.shape is not None  # else there was no model to rehearse with
    print(report(plan, plan.shape, rehearsal), flush=True)
    found = [*model_limits(plan, plan.shape), *too_large(plan, rehearsal.peaks), *scorer_limits(plan)]
    if found:
        print(advice(plan, found, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"
