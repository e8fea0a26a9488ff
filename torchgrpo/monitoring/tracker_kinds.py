"""The trackers that `logging.backend` names, each behind the same three calls.

All three may raise or hang: `monitoring/trackers.py` calls them from a thread of their own. What they need is imported
where one is named, for a run without trackers does not wait for it.
"""

import importlib
import logging as python_logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import yaml

from config.schema.errors import ConfigError, RunOutcome
from config.schema.logging import LoggingConfig

log = python_logging.getLogger("grpo")
REACH_S = 12.0
"""How long W&B may take to ask for a key, and to answer; its own default is 90."""
CLOSE_S = 60.0
"""How long a tracker may take at the end of a run to send what it still holds."""
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "trackio": "trackio"}
"""What each is imported as."""
INSTALLED_WITH = {"mlflow": "mlflow-skinny sqlalchemy alembic", "trackio": "trackio"}
"""The optional ones, and what pip takes. The skinny MLflow has no interface of its own; `pip install mlflow` has."""
PARAMETERS_AT_ONCE, LONGEST_PARAMETER = 100, 500
"""What MLflow takes: settings in one call, and characters of one."""


@dataclass(frozen=True)
class ShownCompletion:
    """One row of the table of completions that trackers get now and then."""

    prompt: str
    completion: str
    reward: float
    advantage: float


COLUMNS: list[Any] = ["step", *(field.name for field in fields(ShownCompletion))]


class Tracker(Protocol):
    """One run in one tracker."""

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of an optimizer step or of an evaluation."""

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        """A table of some of what was written in the step."""

    def close(self, outcome: RunOutcome) -> None:
        """Send what is left and end the run, so that the next one of a sweep is another."""


Tell = Callable[[str], None]


def opener(
    name: str, logging: LoggingConfig, run_dir: Path, config: dict[str, Any]
) -> Callable[[Tell], Tracker]:
    """What makes the tracker `name`; it takes what tells the user a line.

    Raises:
        ConfigError: its package is not installed.
    """
    # Imports in the trackers' own threads, several at once, may meet half a module.
    importlib.import_module("torchrl.record.loggers")
    try:
        importlib.import_module(PACKAGES[name])
    except ImportError as error:
        package = INSTALLED_WITH.get(name, PACKAGES[name])
        raise ConfigError(
            f"logging.backend={name}: {error}; install it with: pip install {package}, or leave {name} out of "
            "logging.backend"
        ) from error
    title = logging.experiment_name or run_dir.name
    kinds: dict[str, Callable[[Tell], Tracker]] = {
        "wandb": lambda tell: Wandb(logging, run_dir, title, config, tell),
        "tensorboard": lambda tell: TensorBoard(run_dir, title, config),
        "mlflow": lambda tell: MLflow(logging, run_dir, title, config),
        "trackio": lambda tell: Trackio(logging, title, config),
    }
    return kinds[name]


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


class TensorBoard:
    """TensorBoard through TorchRL's logger; completions and settings are texts."""

    def __init__(self, run_dir: Path, title: str, config: dict[str, Any]) -> None:
        from torchrl.record.loggers import get_logger

        self.logger: Any = get_logger("tensorboard", logger_name=str(run_dir), experiment_name=title)
        settings = yaml.safe_dump(config, sort_keys=False)
        self.logger.experiment.add_text("config", "\n".join(f"    {line}" for line in settings.splitlines()))

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(dict(numbers), step=step)

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        rows = [COLUMNS, ["---"] * len(COLUMNS), *([step, *astuple(one)] for one in shown)]
        table = "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
        self.logger.experiment.add_text("completions", table, global_step=step)
        self.logger.flush()

    def close(self, outcome: RunOutcome) -> None:
        self.logger.close()


class MLflow:
    """MLflow through its client, which names the run in every call; TorchRL's logger never ends a run, and knows it
    only in the thread that made it.

    It writes where MLFLOW_TRACKING_URI says, else to `mlflow.db` and `mlflow/` in the run's folder.
    """

    def __init__(self, logging: LoggingConfig, run_dir: Path, title: str, config: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        python_logging.getLogger("mlflow").setLevel(python_logging.WARNING)
        python_logging.getLogger("alembic").setLevel(python_logging.WARNING)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        folder = run_dir.resolve()
        self.client = MlflowClient(server or f"sqlite:///{folder}/mlflow.db")
        found = self.client.get_experiment_by_name(logging.project)
        place = None if server else (folder / "mlflow").as_uri()
        experiment = (
            self.client.create_experiment(logging.project, place) if found is None else found.experiment_id
        )
        self.run_id = self.client.create_run(experiment, run_name=title).info.run_id
        settings = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in flat(config)]
        for start in range(0, len(settings), PARAMETERS_AT_ONCE):
            self.client.log_batch(self.run_id, params=settings[start : start + PARAMETERS_AT_ONCE])

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, step) for name, value in numbers.items()]
        self.client.log_batch(self.run_id, metrics=rows)

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        table = {"columns": COLUMNS, "data": [[step, *astuple(one)] for one in shown]}
        self.client.log_dict(self.run_id, table, f"completions/step_{step:06d}.json")

    def close(self, outcome: RunOutcome) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self.client.set_terminated(self.run_id, status)


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


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with dotted keys; `env.options`, which is empty, stays."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cell(value: object) -> str:
    """A cell of a Markdown table, in which a completion's marks are its own characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    marks = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "`": "&#96;", "*": "&#42;"})
    return "<br>".join(text.translate(marks).splitlines())
