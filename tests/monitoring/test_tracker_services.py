"""Tests of the trackers: settings, metrics by step, completions, outcome of the run."""

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from config.schema.errors import ConfigError, RunOutcome
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.tracker_interface import CompletionRow, iterate_dotted
from torchgrpo.monitoring.tracker_threads import tracker_opener
from torchgrpo.monitoring.trackers.wandb import Wandb

CONFIG: dict[str, Any] = {"train": {"seed": 3, "resume": None}, "env": {"options": {}, "data_files": ["a", "b"]}}
ROWS = [CompletionRow("2+3=", "5", 1.0, 0.5), CompletionRow("2+3=", "<script>|*6*\nor 7", 0.0, -0.5)]
TABLE = [[2, "2+3=", "5", 1.0, 0.5], [2, "2+3=", "<script>|*6*\nor 7", 0.0, -0.5]]
COLUMNS = ["step", "prompt", "completion", "reward", "advantage"]


def record_run(name: str, run_dir: Path, outcome: RunOutcome) -> Any:
    """Records two steps, a table and the end of a run; returns the tracker."""
    messages: list[str] = []
    logging = LoggingConfig(backend=name, project="arithmetic", experiment_name="sums")
    tracker = tracker_opener(name, logging, run_dir, CONFIG)(messages.append)
    for step in (1, 2):
        tracker.metrics({"reward/mean": step / 4, "lr": 1e-4}, step)
    tracker.completions(ROWS, 2)
    tracker.close(outcome)
    assert messages == []
    return tracker


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_run("tensorboard", tmp_path, "finished")
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    (table,) = reader.Tensors("completions/text_summary")
    *_, last = table.tensor_proto.string_val[0].decode().splitlines()
    assert table.step == 2
    assert last == "| 2 | 2+3= | &lt;script&gt;&#124;&#42;6&#42;<br>or 7 | 0 | -0.5 |"
    (settings,) = reader.Tensors("config/text_summary")
    assert b"seed: 3" in settings.tensor_proto.string_val[0]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = record_run("wandb", tmp_path, "finished")
    assert tracker.logger.experiment.offline
    assert dict(tracker.logger.experiment.config)["train"] == CONFIG["train"]
    assert list(tmp_path.rglob("*.wandb"))
    (path,) = tmp_path.rglob("completions_*.table.json")
    table = json.loads(path.read_text())
    assert (table["columns"], table["data"]) == (COLUMNS, TABLE)


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("interrupted", 0), ("failed", 1)])
def test_wandb_run_has_the_exit_code_of_the_outcome(
    outcome: RunOutcome, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = tracker_opener("wandb", LoggingConfig(), tmp_path, {})(print)
    assert isinstance(tracker, Wandb)
    codes: list[int] = []
    experiment = tracker.logger.experiment
    finish = experiment.finish
    monkeypatch.setattr(experiment, "finish", lambda exit_code=0: (codes.append(exit_code), finish(exit_code)))
    tracker.close(outcome)
    assert codes == [code]


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("finished", "FINISHED"),
        pytest.param("interrupted", "KILLED", marks=pytest.mark.long),
        pytest.param("failed", "FAILED", marks=pytest.mark.long),
    ],
)
def test_mlflow_writes_to_the_run_folder(
    outcome: RunOutcome, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record_run("mlflow", tmp_path, outcome)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert list(database.execute("select name, status from runs")) == [("sums", status)]
        settings = dict(database.execute("select key, value from params"))
        numbers = list(database.execute("select step, value from metrics where key = 'reward/mean' order by step"))
        assert list(database.execute("select name from experiments where name != 'Default'")) == [("arithmetic",)]
    assert numbers == [(1, 0.25), (2, 0.5)]
    assert settings == {
        "train.seed": "3", "train.resume": "None", "env.options": "{}", "env.data_files": "['a', 'b']"
    }  # fmt: skip
    (path,) = (tmp_path / "mlflow").rglob("completions/step_000002.json")
    assert json.loads(path.read_text()) == {"columns": COLUMNS, "data": TABLE}


def test_mlflow_uses_the_tracking_uri_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    tracker = tracker_opener("mlflow", LoggingConfig(), tmp_path / "run", CONFIG)(print)
    tracker.close("finished")
    assert (tmp_path / "other.db").is_file()
    assert not (tmp_path / "run").exists()


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    record_run("trackio", tmp_path, "finished")
    assert capfd.readouterr().out == ""  # standard output is for results
    rows = SQLiteStorage.get_logs("arithmetic", "sums")
    assert [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row] == [(1, 0.25), (2, 0.5)]
    (table,) = (row["completions"] for row in rows if "completions" in row)
    assert [list(row.values()) for row in table["_value"]] == TABLE


def test_missing_package_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"logging\.backend=mlflow: .* pip install mlflow-skinny sqlalchemy alembic"):
        tracker_opener("mlflow", LoggingConfig(), tmp_path, {})


def test_settings_have_dotted_keys() -> None:
    assert dict(iterate_dotted(CONFIG)) == {
        "train.seed": 3, "train.resume": None, "env.options": {}, "env.data_files": ["a", "b"]
    }  # fmt: skip
