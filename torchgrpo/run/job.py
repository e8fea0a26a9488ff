"""The jobs of the command line: `run=NAME` is `jobs/NAME.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from config.schema.config import JOBS, Config
from config.schema.errors import RunOutcome
from torchgrpo.run.overlapped import ScheduleType


@dataclass(frozen=True)
class Job(Generic[ScheduleType]):
    """Input of a job: its settings, its folder, and the loop of the script.

    train: the loop. schedule: the run that the loop works with. on_start: called when a run or an evaluation is sure to
    begin; before, what an earlier one left is as it was.
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
    """Run the job that `config.run` names; see `Job`."""
    outcome: RunOutcome = JOBS.load(config.run)(Job(config, run_dir, train, schedule, on_start))
    return outcome
