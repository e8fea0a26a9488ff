"""The start of both scripts: Hydra in, exit code out.

launch ─▶ Hydra ─▶ Config (checked) ─▶ the job that `run=` names ─▶ exit code
"""

import sys
from collections.abc import Callable
from pathlib import Path

from config.command_line import command_line
from config.errors import INTERRUPTED, RunOutcome
from config.schema import Config
from run.jobs import run_job
from run.overlapped import ScheduleType
from run.stop import Stop
from run.sweep import reported


def launch(train: Callable[[ScheduleType], None], schedule: type[ScheduleType]) -> None:
    """The command line of a script: compose, check, run the job; config/command_line.py says how it ends.

    train: the script's loop. schedule: what the loop works with.
    """

    def job(config: Config, run_dir: Path, begun: Callable[[], None]) -> RunOutcome:
        if config.run == "selftest":
            return run_selftest(run_dir)
        return run_job(config, run_dir, train, schedule, begun)

    Stop().watch()
    with reported():
        command_line(job)


def run_selftest(run_dir: Path) -> RunOutcome:
    """`run=selftest`: what works on this machine, whatever the config says. It runs the scripts, which run this."""
    from selftest.main import selftest

    try:
        code = selftest(run_dir)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code:
        sys.exit(code)
    return "finished"
