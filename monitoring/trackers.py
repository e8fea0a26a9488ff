"""Where metrics go beside `metrics.jsonl`: the tracker that `logging.backend` names."""

import logging as python_logging
import sys
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, WandbLogger, get_logger

from config.outcome import RunOutcome
from config.schema import LoggingConfig

log = python_logging.getLogger("grpo")
REACH_S = 12.0
"""How long W&B may take to ask for a key, and to answer; its own default is 90."""


def make_tracker(logging: LoggingConfig, run_dir: Path, config: dict[str, Any]) -> Logger | None:
    """W&B or TensorBoard through TorchRL's loggers; None for `logging.backend=none`.

    W&B goes offline, and says so once, where `logging.mode=online` finds no key or no server within `REACH_S` seconds.
    """
    if logging.backend == "none":
        return None
    name = logging.experiment_name or run_dir.name
    if logging.backend != "wandb":
        return get_logger(logging.backend, logger_name=str(run_dir), experiment_name=name)
    if logging.mode == "online":
        import wandb  # a second

        try:
            return _wandb(logging, run_dir, name, config, offline=False)
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            said = (
                f"logging.mode=online: W&B cannot be used ({reason}), so the run is recorded offline. Send it later "
                f"with `wandb sync {run_dir}/wandb/offline-run-*`; `wandb login` or WANDB_API_KEY gives a key"
            )
            print(said, file=sys.stderr)
            log.info(said)
    return _wandb(logging, run_dir, name, config, offline=True)


def _wandb(logging: LoggingConfig, run_dir: Path, name: str, config: dict[str, Any], offline: bool) -> Logger:
    """Raises wandb.Error where there is no key or no answer."""
    import wandb

    options = {
        "project": logging.project,
        "offline": offline,
        "mode": "offline" if offline else "online",  # else that of the environment at its first start holds
        "config": config,
        "settings": wandb.Settings(init_timeout=REACH_S, login_timeout=REACH_S),
    }
    return get_logger("wandb", logger_name=str(run_dir), experiment_name=name, wandb_kwargs=options)


def close_tracker(tracker: Logger, outcome: RunOutcome) -> None:
    """End its run, so that the next one of a sweep is another; W&B shows a failed one as failed."""
    if isinstance(tracker, WandbLogger) and outcome == "failed":
        tracker.experiment.finish(exit_code=1)
    tracker.close()
