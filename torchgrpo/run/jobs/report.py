"""The job `run=report`: the page of a run, or of several."""

from collections.abc import Callable
from pathlib import Path

from config.run_folder.folders import remove_if_unused
from config.schema.config import Config
from config.schema.errors import RunOutcome
from torchgrpo.run.overlapped import ScheduleType


def run_job(
    config: Config,
    run_dir: Path,
    train: Callable[[ScheduleType], None],
    schedule: type[ScheduleType],
    on_start: Callable[[], None],
) -> RunOutcome:
    from torchgrpo.run.report import report

    remove_if_unused(run_dir)
    print(report(config), flush=True)
    return "finished"
