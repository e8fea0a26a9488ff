"""The jobs of the command line: `run=NAME` is `jobs/NAME.py`."""

from collections.abc import Callable
from pathlib import Path

from config.schema.config import JOBS, Config
from config.schema.errors import RunOutcome
from torchgrpo.run.overlapped import ScheduleType


def run_job(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """Run the job that `config.run` names, in the folder `run_dir`.

    train: the loop of a script. schedule: the run that the loop works with.
    on_start: called when a run or an evaluation is sure to begin; before, what an earlier one left is as it was.
    """
    outcome: RunOutcome = JOBS.load(config.run)(config, run_dir, train, schedule, on_start)
    return outcome
