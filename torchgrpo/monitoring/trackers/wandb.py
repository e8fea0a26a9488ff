"""The tracker `wandb`: Weights & Biases through TorchRL's logger."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.tracker_interface import CLOSE_S, COLUMNS, OpenTracker, ShownCompletion, Tell

REACH_S = 12.0
"""How long W&B may take to ask for a key, and to answer; its own default is 90."""


class Wandb:
    """Weights & Biases through TorchRL's logger; offline, and said so once, where `logging.mode=online` finds no key or
    no server within `REACH_S` seconds."""

    def __init__(
        self, logging: LoggingConfig, run_dir: Path, title: str, config: dict[str, Any], tell: Tell
    ) -> None:
        import wandb

        # Settings that other versions may not know. Asking who the key's owner is, only to print it, takes 10 seconds
        # more where no server answers.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(CLOSE_S))
        os.environ.setdefault("WANDB_X_DISABLE_VIEWER", "true")
        self.options = {"project": logging.project, "config": config}
        if logging.mode == "online":
            try:
                self.logger = self._open(run_dir, title, offline=False)
                return
            except wandb.Error as error:
                reason = str(error).splitlines()[0]
                tell(
                    f"logging.mode=online: W&B cannot be used ({reason}), so the run is recorded offline. Send it "
                    f"later with `wandb sync {run_dir}/wandb/offline-run-*`; `wandb login` or WANDB_API_KEY gives a key"
                )
        self.logger = self._open(run_dir, title, offline=True)

    def _open(self, run_dir: Path, title: str, offline: bool) -> Any:
        """Raises wandb.Error where there is no key or no answer."""
        import wandb
        from torchrl.record.loggers import get_logger

        options = self.options | {
            "offline": offline,
            # Else that of the environment at its first start holds.
            "mode": "offline" if offline else "online",
            "settings": wandb.Settings(init_timeout=REACH_S, login_timeout=REACH_S),
        }
        return get_logger("wandb", logger_name=str(run_dir), experiment_name=title, wandb_kwargs=options)

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(dict(numbers), step=step)

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        import wandb

        table = wandb.Table(columns=COLUMNS, data=[[step, *astuple(one)] for one in shown])
        self.logger.experiment.log({"completions": table, "step": step})

    def close(self, outcome: RunOutcome) -> None:
        """W&B shows a failed run as failed."""
        self.logger.experiment.finish(exit_code=1 if outcome == "failed" else 0)


OPEN = OpenTracker("wandb", Wandb)
