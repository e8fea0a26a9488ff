"""The job `run=rewards`: judges saved completions; of the model only its chat template is read."""

import sys
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
    from torchgrpo.run.rewards import run_rewards

    code = run_rewards(config.env, model=config.model)
    remove_if_unused(run_dir)
    if code:
        sys.exit(code)
    return "finished"
