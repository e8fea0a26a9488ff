"""Tracker `trackio`: sends metrics to a local trackio project."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import astuple
from typing import Any

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.tracker_interface import COLUMNS, CompletionRow, TrackerFactory, iterate_dotted


class Trackio:
    """One trackio run, written without TorchRL's logger, which writes a row for each number."""

    def __init__(self, logging: LoggingConfig, title: str, config: dict[str, Any]) -> None:
        import trackio

        with redirect_stdout(sys.stderr):  # standard output is for results
            self.run: Any = trackio.init(
                logging.project, title, config=dict(iterate_dotted(config)), auto_log_cpu=False, auto_log_gpu=False
            )

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def completions(self, rows: Sequence[CompletionRow], step: int) -> None:
        import trackio

        table = trackio.Table(columns=COLUMNS, data=[[step, *astuple(row)] for row in rows])
        self.run.log({"completions": table}, step=step)

    def close(self, outcome: RunOutcome) -> None:
        with redirect_stdout(sys.stderr):
            self.run.finish()


FACTORY = TrackerFactory("trackio", lambda logging, run_dir, title, config, on_message: Trackio(logging, title, config))
