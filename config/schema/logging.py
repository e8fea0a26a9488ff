"""The `logging` section: trackers, what is printed, and what is kept of the groups."""

from dataclasses import dataclass
from typing import Any

from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.values import at_least, one_of

TRACKERS = Registry("logging.backend", "torchgrpo.monitoring.trackers", "OPEN")


@dataclass
class LoggingConfig:
    """Trackers beside `metrics.jsonl`, and output on the terminal."""

    backend: Any = "none"
    """Trackers: `wandb`, `tensorboard`, `mlflow`, `trackio`, a list of them such as `[wandb,tensorboard]`, or `none`;
    `metrics.jsonl` is always written."""
    mode: str = "offline"
    """W&B only: `online` or `offline`."""
    project: str = "grpo"
    """Project of W&B and trackio, experiment of MLflow."""
    experiment_name: str | None = None
    """Name of the run in the tracker. Unset: the run folder's."""
    sample_frequency: int = 20
    """Iterations between sample completions, printed and sent to the trackers; 0: none."""
    progress: bool = True
    """A bar with step, reward and time left on a terminal, a line every ten seconds in a log."""
    rollouts_gb: float = 10.0
    """The ledger: every group of training and evaluation goes to `rollouts/` in the run's folder, which may take so
    many gigabytes; then the oldest files go. 0: none is kept."""

    def __post_init__(self) -> None:
        one_of("logging.mode", self.mode, ("online", "offline"))
        at_least("logging.rollouts_gb", self.rollouts_gb, 0)
        at_least("logging.sample_frequency", self.sample_frequency, 0)
        names = self._named()
        for name in names or [self.backend]:
            TRACKERS.check(name, "none")
        if "none" in names and len(names) > 1:
            raise ConfigError(f"logging.backend={self.backend!r}: `none` goes with no other tracker")

    @property
    def backends(self) -> list[str]:
        """The trackers, each once; empty for `none`."""
        return [name for name in dict.fromkeys(self._named()) if name != "none"]

    def _named(self) -> list[Any]:
        if isinstance(self.backend, str):
            return [name.strip() for name in self.backend.split(",")]
        return self.backend if isinstance(self.backend, list) else []
