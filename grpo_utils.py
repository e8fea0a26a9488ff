"""Starts both scripts: composes the config with Hydra, and runs the job that `run=` names.

launch ─▶ Hydra ─▶ Config (checked) ─▶ the job that `run=` names ─▶ exit code
"""

from collections.abc import Callable
from pathlib import Path

from config.cli.command_line import command_line
from config.schema.config import Config
from config.schema.errors import RunOutcome
from torchgrpo.run.job import run_job
from torchgrpo.run.overlapped_run import ScheduleType
from torchgrpo.run.stop_signals import StopRequest
from torchgrpo.run.sweep import write_sweep_report


def launch(train: Callable[[ScheduleType], None], schedule: type[ScheduleType]) -> None:
    """Composes and checks the config, and runs its job; config/cli/command_line.py has the exit codes.

    train: the script's training loop. schedule: the class of the run that the loop drives.
    """

    def job(config: Config, run_dir: Path, on_start: Callable[[], None]) -> RunOutcome:
        return run_job(config, run_dir, train, schedule, on_start)

    StopRequest().watch()
    with write_sweep_report():
        command_line(job)
