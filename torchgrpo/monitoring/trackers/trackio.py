"""The tracker `trackio`."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import astuple
from typing import Any

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.tracker_interface import COLUMNS, OpenTracker, ShownCompletion, flat


class Trackio:
    """trackio by itself: TorchRL's logger makes a row of each number."""

    def __init__(self, logging: LoggingConfig, title: str, config: dict[str, Any]) -> None:
        import trackio

        with redirect_stdout(sys.stderr):  # standard output is for results
            self.run: Any = trackio.init(
                logging.project, title, config=dict(flat(config)), auto_log_cpu=False, auto_log_gpu=False
            )

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        import trackio

        table = trackio.Table(columns=COLUMNS, data=[[step, *astuple(one)] for one in shown])
        self.run.log({"completions": table}, step=step)

    def close(self, outcome: RunOutcome) -> None:
        with redirect_stdout(sys.stderr):
            self.run.finish()


OPEN = OpenTracker("trackio", lambda logging, run_dir, title, config, tell: Trackio(logging, title, config))
