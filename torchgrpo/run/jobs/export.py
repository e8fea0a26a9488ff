"""The job `run=export`: makes a model of a checkpoint."""

from collections.abc import Callable
from pathlib import Path

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
    from torchgrpo.run.export import export

    return export(config, run_dir)
