"""The start of both scripts: Hydra in, exit code out.

launch ─▶ Hydra ─▶ Config (checked) ─▶ the job that `run=` names ─▶ exit code
"""

from collections.abc import Callable
from pathlib import Path

from config.cli.command_line import command_line
from config.schema.config import Config
from config.schema.errors import RunOutcome
from torchgrpo.run.job import run_job
from torchgrpo.run.overlapped import ScheduleType
from torchgrpo.run.signals import Stop
from torchgrpo.run.sweep import reported


def launch(train: Callable[[ScheduleType], None], schedule: type[ScheduleType]) -> None:
    """The command line of a script: compose, check, run the job; config/cli/command_line.py says how it ends.

    train: the script's loop. schedule: what the loop works with.
    """

    def job(config: Config, run_dir: Path, on_start: Callable[[], None]) -> RunOutcome:
        return run_job(config, run_dir, train, schedule, on_start)

    Stop().watch()
    with reported():
        command_line(job)
