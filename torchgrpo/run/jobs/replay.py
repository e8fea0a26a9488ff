"""The job `run=replay`: computes one of a run's optimizer steps again."""

from collections.abc import Callable
from pathlib import Path

from config.cli.command_line import typed
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
    from torchgrpo.run.replay import replay

    remove_if_unused(run_dir)
    print(replay(chosen_run(config.run_dir), config.step, typed()), flush=True)
    return "finished"
