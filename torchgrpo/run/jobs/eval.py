"""The job `run=eval`: evaluates `model.name`, or the checkpoint of `train.resume`.

There is no learner, no scorer and no training data.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from config.run_folder.folders import held
from config.schema.config import Config
from config.schema.errors import INTERRUPTED, RunOutcome
from config.schema.models import RefModelConfig
from torchgrpo.run.checkpoint_model import evaluated_model
from torchgrpo.run.overlapped import ScheduleType


def run_job(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None],
) -> RunOutcome:
    from torchgrpo.run.build import plan_run, prepare
    from torchgrpo.run.evaluation import evaluate_alone

    with held(run_dir):
        with evaluated_model(config, run_dir, schedule) as (evaluated, saved):
            nothing_scored = replace(evaluated, ref_model=RefModelConfig())
            plan = plan_run(nothing_scored, schedule, run_dir)
            prepare(evaluated, plan)
            outcome = evaluate_alone(evaluated, run_dir, plan, saved, on_start)
        if outcome == "interrupted":
            sys.exit(INTERRUPTED)
        return outcome
