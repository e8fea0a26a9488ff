"""Tracker `wandb`: sends metrics to Weights & Biases through TorchRL's logger."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.tracker_interface import CLOSE_S, COLUMNS, CompletionRow, OnMessage, TrackerFactory

REACH_S = 12.0
"""Maximum seconds for the login and for the answer of the server; the default of W&B is 90."""


class Wandb:
    """One W&B run, online or offline.

    With `logging.mode=online`, the run is offline if there is no key or if no server answers within `REACH_S`
    seconds; a message reports that.
    """

    def __init__(
        self, logging: LoggingConfig, run_dir: Path, title: str, config: dict[str, Any], on_message: OnMessage
    ) -> None:
        import wandb

        # Environment variables, since other versions may lack these settings. The viewer query prints the owner of the
        # key; without a server, the query waits for its own timeout.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(CLOSE_S))
        os.environ.setdefault("WANDB_X_DISABLE_VIEWER", "true")
        self.options = {"project": logging.project, "config": config}
        if logging.mode == "online":
            try:
                self.logger = self._open(run_dir, title, offline=False)
                return
            except wandb.Error as error:
                reason = str(error).splitlines()[0]
                on_message(
                    f"logging.mode=online: W&B cannot be used ({reason}), so the run is recorded offline. Send it "
                    f"later with `wandb sync {run_dir}/wandb/offline-run-*`; set a key with `wandb login` or "
                    "WANDB_API_KEY"
                )
        self.logger = self._open(run_dir, title, offline=True)

    def _open(self, run_dir: Path, title: str, offline: bool) -> Any:
        """Opens the W&B run. Raises wandb.Error without a key or an answer."""
        import wandb
        from torchrl.record.loggers import get_logger

        options = self.options | {
            "offline": offline,
            # Overrides the mode that W&B read from the environment at its first start.
            "mode": "offline" if offline else "online",
            "settings": wandb.Settings(init_timeout=REACH_S, login_timeout=REACH_S),
        }
        return get_logger("wandb", logger_name=str(run_dir), experiment_name=title, wandb_kwargs=options)

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(dict(numbers), step=step)

    def completions(self, rows: Sequence[CompletionRow], step: int) -> None:
        import wandb

        table = wandb.Table(columns=COLUMNS, data=[[step, *astuple(row)] for row in rows])
        self.logger.experiment.log({"completions": table, "step": step})

    def close(self, outcome: RunOutcome) -> None:
        """Ends the run; W&B shows a failed run as failed."""
        self.logger.experiment.finish(exit_code=1 if outcome == "failed" else 0)


FACTORY = TrackerFactory("wandb", Wandb)
