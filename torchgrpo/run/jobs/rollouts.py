"""The job `run=rollouts`: shows what a run generated."""

from collections.abc import Callable
from pathlib import Path

from config.cli.saved_settings import chosen_run
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
    from torchgrpo.run.rollouts import rollouts

    remove_if_unused(run_dir)
    print(rollouts(chosen_run(config.run_dir), config.rollouts), flush=True)
    return "finished"
