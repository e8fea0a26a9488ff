"""The tracker `mlflow`: MLflow through its client."""

import logging as python_logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.tracker_interface import COLUMNS, OpenTracker, ShownCompletion, flat

PARAMETERS_AT_ONCE, LONGEST_PARAMETER = 100, 500
"""What MLflow takes: settings in one call, and characters of one."""


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
        found, project = self.client.get_experiment_by_name(logging.project), logging.project
        place = None if server else (folder / "mlflow").as_uri()
        experiment = self.client.create_experiment(project, place) if found is None else found.experiment_id
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


# The skinny MLflow has no interface of its own; `pip install mlflow` has.
OPEN = OpenTracker(
    "mlflow",
    lambda logging, run_dir, title, config, tell: MLflow(logging, run_dir, title, config),
    "mlflow-skinny sqlalchemy alembic",
)
