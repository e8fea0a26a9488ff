"""Tracker `mlflow`: sends settings, metrics and completions to MLflow through its client."""

import logging as python_logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.tracker_interface import COLUMNS, CompletionRow, TrackerFactory, iterate_dotted

PARAMETERS_PER_CALL, LONGEST_PARAMETER = 100, 500
"""Limits of MLflow: settings in one call, and characters of one setting."""


class MLflow:
    """One MLflow run, written through the MLflow client.

    The client names the run in every call. TorchRL's logger is not used: it never ends a run and keeps the run in
    a thread-local variable. The run is written to MLFLOW_TRACKING_URI, by default to `mlflow.db` and `mlflow/` in
    the run's folder.
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
        experiment, project = self.client.get_experiment_by_name(logging.project), logging.project
        artifact_uri = None if server else (folder / "mlflow").as_uri()
        if experiment is None:
            experiment_id = self.client.create_experiment(project, artifact_uri)
        else:
            experiment_id = experiment.experiment_id
        self.run_id = self.client.create_run(experiment_id, run_name=title).info.run_id
        settings = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in iterate_dotted(config)]
        for start in range(0, len(settings), PARAMETERS_PER_CALL):
            self.client.log_batch(self.run_id, params=settings[start : start + PARAMETERS_PER_CALL])

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, step) for name, value in numbers.items()]
        self.client.log_batch(self.run_id, metrics=rows)

    def completions(self, rows: Sequence[CompletionRow], step: int) -> None:
        table = {"columns": COLUMNS, "data": [[step, *astuple(row)] for row in rows]}
        self.client.log_dict(self.run_id, table, f"completions/step_{step:06d}.json")

    def close(self, outcome: RunOutcome) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self.client.set_terminated(self.run_id, status)


# mlflow-skinny has no web interface; `pip install mlflow` has one.
FACTORY = TrackerFactory(
    "mlflow",
    lambda logging, run_dir, title, config, on_message: MLflow(logging, run_dir, title, config),
    "mlflow-skinny sqlalchemy alembic",
)
