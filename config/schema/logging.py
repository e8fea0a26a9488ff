"""The `logging` section: trackers, terminal output, and the ledger of groups."""

from dataclasses import dataclass
from typing import Any

from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.values import check_choice, check_minimum

TRACKERS = Registry("logging.backend", "torchgrpo.monitoring.trackers", "FACTORY")


@dataclass
class LoggingConfig:
    """Trackers in addition to `metrics.jsonl`, and the output on the terminal."""

    backend: Any = "none"
    """Trackers: `wandb`, `tensorboard`, `mlflow`, `trackio`, a list such as `[wandb,tensorboard]`, or `none`.
    `metrics.jsonl` is always written."""
    mode: str = "offline"
    """W&B only: `online` or `offline`."""
    project: str = "grpo"
    """Name of the project in W&B and trackio, and of the experiment in MLflow."""
    experiment_name: str | None = None
    """Name of the run in the tracker. Unset: the name of the run's folder."""
    sample_frequency: int = 20
    """Iterations between sample completions, which are printed and sent to the trackers; 0: none."""
    progress: bool = True
    """Shows progress: on a terminal a bar with step, reward and remaining time, in a log a line every ten
    seconds."""
    rollouts_gb: float = 10.0
    """Maximum size in gigabytes of the ledger, which contains all groups of training and evaluation. The ledger
    is in `rollouts/` in the run's folder; beyond the limit, its oldest files are removed. 0: no ledger."""

    def __post_init__(self) -> None:
        check_choice("logging.mode", self.mode, ("online", "offline"))
        check_minimum("logging.rollouts_gb", self.rollouts_gb, 0)
        check_minimum("logging.sample_frequency", self.sample_frequency, 0)
        names = self._backend_names()
        for name in names or [self.backend]:
            TRACKERS.check(name, "none")
        if "none" in names and len(names) > 1:
            raise ConfigError(
                f"logging.backend={self.backend!r}: `none` excludes other trackers; remove `none` or the other names"
            )

    @property
    def backends(self) -> list[str]:
        """Names of the trackers without duplicates; empty for `none`."""
        return [name for name in dict.fromkeys(self._backend_names()) if name != "none"]

    def _backend_names(self) -> list[Any]:
        if isinstance(self.backend, str):
            return [name.strip() for name in self.backend.split(",")]
        return self.backend if isinstance(self.backend, list) else []
