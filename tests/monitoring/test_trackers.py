"""Every backend receives the numbers; metrics.jsonl survives a crash in mid-line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from config.schema import LoggingConfig
from monitoring.monitor import Monitor
from monitoring.progress import Progress
from monitoring.trackers import MetricsFile, close_tracker, make_tracker
from tests.scripts import ROOT


def test_tensorboard_receives_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = make_tracker(LoggingConfig(backend="tensorboard"), tmp_path, {})
    assert tracker is not None
    for step in (1, 2):
        tracker.log_scalar("reward/mean", step / 4, step=step)
    tracker.experiment.flush()
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_wandb_offline_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = make_tracker(LoggingConfig(backend="wandb", mode="offline"), tmp_path, {"train": {"seed": 3}})
    assert tracker is not None
    tracker.log_scalar("reward/mean", 0.5, step=1)
    assert tracker.experiment.offline
    assert dict(tracker.experiment.config)["train"] == {"seed": 3}
    tracker.experiment.finish()
    assert list(tmp_path.rglob("*.wandb"))


def test_every_run_of_a_sweep_is_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    seen = []
    for seed in (3, 4):
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        settings = LoggingConfig(backend="wandb", mode="offline", progress=False)
        tracker = make_tracker(settings, run_dir, {"train": {"seed": seed}})
        assert tracker is not None
        seen.append((tracker.experiment.id, dict(tracker.experiment.config)["train"]["seed"]))
        Monitor(run_dir, tracker, repeats=1, live=Progress(settings, total_steps=1)).close("finished")
    assert seen[0][0] != seen[1][0]
    assert [seed for _, seed in seen] == [3, 4]
    assert len(list(tmp_path.rglob("*.wandb"))) == 2


def test_a_failed_run_is_shown_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = make_tracker(LoggingConfig(backend="wandb", mode="offline"), tmp_path, {})
    assert tracker is not None
    codes: list[int] = []
    finish = tracker.experiment.finish
    monkeypatch.setattr(
        tracker.experiment, "finish", lambda exit_code=0: (codes.append(exit_code), finish(exit_code))
    )
    close_tracker(tracker, "failed")
    assert codes[0] == 1


def test_no_backend_is_no_tracker(tmp_path: Path) -> None:
    assert make_tracker(LoggingConfig(backend="none"), tmp_path, {}) is None


def test_a_torn_last_line_is_left_out_when_a_run_continues(tmp_path: Path) -> None:
    earlier = MetricsFile(tmp_path / "earlier.jsonl")
    for step in (1, 2, 3):
        earlier.append({"optimizer_step": step, "reward/mean": step / 10})
    with earlier.path.open("a") as file:
        file.write('{"optimizer_step": 4, "rew')
    continued = MetricsFile(tmp_path / "continued.jsonl")
    continued.continue_from(earlier, optimizer_steps=2)
    lines = [json.loads(line) for line in continued.path.read_text().splitlines()]
    assert [line["optimizer_step"] for line in lines] == [1, 2]


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_half_of_it(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the kernel takes a part and refuses the rest."""
    script = """
import resource, sys
from pathlib import Path
from monitoring.trackers import MetricsFile
metrics = MetricsFile(Path(sys.argv[1]))
metrics.append({"optimizer_step": 1, "reward/mean": 0.5})
resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))
metrics.append({"optimizer_step": 2, "reward/mean": 0.625})
"""
    path = tmp_path / "metrics.jsonl"
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "OSError: [Errno 27] File too large" in run.stderr
    assert path.read_text() == json.dumps({"optimizer_step": 1, "reward/mean": 0.5}) + "\n"
