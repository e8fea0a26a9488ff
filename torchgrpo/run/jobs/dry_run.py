"""Job `run=dry_run`: runs the learner's step on fake tensors and prints its memory and time.

The machine is this one or the one that the settings describe. The exit code is 2 where the step would not fit.
"""

import sys
from typing import Any

from config.run_folder.folders import remove_unused_folder
from config.schema.errors import RunOutcome
from torchgrpo.run.checkpoint_model import resolve_checkpoint_models
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    from torchgrpo.plan.machine import configured_machine, this_machine
    from torchgrpo.plan.make_plan import make_plan
    from torchgrpo.plan.plan_report import format_advice
    from torchgrpo.plan.problems import model_problems, scorer_problems
    from torchgrpo.run.dry_run.dry_run_report import format_dry_run, oversized_phases
    from torchgrpo.run.dry_run.step import dry_run_step

    config, _ = resolve_checkpoint_models(job.config)
    machine = configured_machine(config.machine, this_machine(job.run_dir))
    plan = make_plan(config, job.schedule.is_overlapped, machine, job.run_dir)
    remove_unused_folder(job.run_dir)
    dry_run = dry_run_step(plan)
    assert plan.shape is not None, "a dry run needs a model of known sizes"
    print(format_dry_run(plan, plan.shape, dry_run), flush=True)
    problems = [*model_problems(plan, plan.shape), *oversized_phases(plan, dry_run.peaks), *scorer_problems(plan)]
    if problems:
        print(format_advice(plan, problems, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"
