"""Runs the job that `run=NAME` selects, from `jobs/NAME.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from config.schema.config import JOBS, Config
from config.schema.errors import RunOutcome
from torchgrpo.run.overlapped_run import ScheduleType


@dataclass(frozen=True)
class Job(Generic[ScheduleType]):
    """Input of a job: its settings, its folder, and the training loop of the script.

    train: the training loop. schedule: the class of the run that the loop drives. on_start: called when a run or an
    evaluation is about to begin; until then files of an earlier run in the folder are untouched.
    """

    config: Config
    run_dir: Path
    train: Callable[[ScheduleType], None]
    schedule: type[ScheduleType]
    on_start: Callable[[], None] = lambda: None


def run_job(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """Runs the job that `config.run` names; the arguments are those of `Job`."""
    outcome: RunOutcome = JOBS.load(config.run)(Job(config, run_dir, train, schedule, on_start))
    return outcome
