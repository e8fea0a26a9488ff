"""Tests of metrics.jsonl after crashes, and of W&B without a reachable server."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from config.schema.errors import RunOutcome
from config.schema.logging import LoggingConfig
from tests.script_runner import ENVIRONMENT, ROOT, start_python
from torchgrpo.monitoring.metrics_file import MetricsFile
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.monitoring.progress import Progress
from torchgrpo.monitoring.tracker_threads import make_tracker
from torchgrpo.monitoring.trackers.wandb import Wandb


@pytest.mark.long
def test_each_run_of_a_sweep_is_a_separate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run_ids_and_seeds = []
    close = Wandb.close

    def record_close(self: Wandb, outcome: RunOutcome) -> None:
        run_ids_and_seeds.append((self.logger.experiment.id, dict(self.logger.experiment.config)["train"]["seed"]))
        close(self, outcome)

    monkeypatch.setattr(Wandb, "close", record_close)
    for seed in (3, 4):
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        settings = LoggingConfig(backend="wandb", mode="offline", progress=False)
        tracker = make_tracker(settings, run_dir, {"train": {"seed": seed}})
        Monitor(run_dir, tracker, progress=Progress(settings, total_steps=1)).close("finished")
    assert run_ids_and_seeds[0][0] != run_ids_and_seeds[1][0]
    assert [seed for _, seed in run_ids_and_seeds] == [3, 4]
    assert len(list(tmp_path.rglob("*.wandb"))) == 2


def test_backend_none_has_no_tracker(tmp_path: Path) -> None:
    assert make_tracker(LoggingConfig(backend="none"), tmp_path, {}) is None


BAD_LINES = {
    "partial line": b'{"optimizer_step": 4, "rew',
    "ends like a row": b'{"optimizer_step": 4, "x": {"y": 1}',
    "no JSON": b"garbage}",
    "no UTF-8": b'{"optimizer_step": 4, "x": "\xff\xfe"}',
    "zeros": bytes(4096),
    "nested without an end": b"[" * 100_000 + b"}",
    "no row": b'"}"',
    "no step": b'{"step": 4}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("is_last", [True, False])
def test_unreadable_line_is_left_out_when_a_run_continues(line: bytes, is_last: bool, tmp_path: Path) -> None:
    """Reports an unreadable line, but not a last line, which a crash may have cut."""
    folders = tmp_path / "source", tmp_path / "target"
    for folder in folders:
        folder.mkdir()
    source, target = (MetricsFile(folder / "metrics.jsonl") for folder in folders)
    for step in (1, 2):
        source.append({"optimizer_step": step, "reward/mean": step / 10})
    with source.path.open("ab") as file:
        file.write(line if is_last else line + b"\n")
    if not is_last:
        source.append({"optimizer_step": 3})
    messages = target.copy_rows(folders[0], optimizer_steps=2)
    assert target.read_rows() == [{"optimizer_step": 1, "reward/mean": 0.1}, {"optimizer_step": 2, "reward/mean": 0.2}]
    assert target.path.read_bytes().endswith(b"}\n")
    text = f"{source.path}: 1 lines are not rows of metrics and are left out (line 3)"
    assert messages == ([] if is_last else [text])


def test_row_after_a_partial_line_is_a_separate_line(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text('{"optimizer_step": 1, "rew')
    assert metrics.copy_rows(tmp_path, optimizer_steps=5) == []
    metrics.append({"optimizer_step": 1})
    assert metrics.path.read_text() == '{"optimizer_step": 1}\n'


def test_row_without_disk_space_leaves_no_partial_line(tmp_path: Path) -> None:
    """Simulates a full disk by a limit on the file size.

    The kernel then writes a part of the row only.
    """
    script = """
import resource, sys
from pathlib import Path
from torchgrpo.monitoring.metrics_file import MetricsFile
metrics = MetricsFile(Path(sys.argv[1]))
metrics.append({"optimizer_step": 1, "reward/mean": 0.5})
resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))
metrics.append({"optimizer_step": 2, "reward/mean": 0.625})
"""
    path = tmp_path / "metrics.jsonl"
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert "OSError: [Errno 27] File too large" in run.stderr
    assert path.read_text() == json.dumps({"optimizer_step": 1, "reward/mean": 0.5}) + "\n"


ONLINE_SCRIPT = """
import sys
from pathlib import Path
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring import tracker_threads
from torchgrpo.monitoring.trackers import wandb

wandb.REACH_S = 1.0  # shorter than the default
tracker = tracker_threads.make_tracker(LoggingConfig(backend="wandb", mode="online"), Path(sys.argv[1]), {})
tracker.metrics({"reward/mean": 0.5}, 1)
tracker.close("finished")
print("\\n".join(tracker.take_messages()), file=sys.stderr)
"""


def start_online_run(server: str, folder: Path, port: int) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("WANDB_")}
    environment = inherited | {
        "NETRC": str(folder / "netrc"),  # no API key of the user
        "WANDB_CONFIG_DIR": str(folder),
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_ERROR_REPORTING": "false",
    }
    if server == "no key":
        del environment["WANDB_API_KEY"]
    script = folder / "online.py"
    script.write_text(ONLINE_SCRIPT)
    return start_python([str(script), str(folder)], environment=environment)


@pytest.mark.parametrize(
    "server",
    ["no key", pytest.param("refuses", marks=pytest.mark.long), pytest.param("never answers", marks=pytest.mark.long)],
)
def test_wandb_goes_offline_without_a_server(server: str, tmp_path: Path) -> None:
    """Checks that a silent server gets only the request for the run.

    Other requests of W&B have timeouts of their own.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "never answers":
            listener.listen(50)
        _, stderr = wait_for_success(start_online_run(server, tmp_path, listener.getsockname()[1]))
        assert stderr.count("logging.mode=online: W&B cannot be used") == 1
        assert "warning" not in stderr
        assert "Traceback" not in stderr
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        if server == "never answers":
            listener.setblocking(False)
            assert {json.loads(body)["operationName"] for body in _request_bodies(listener)} == {"RunResumeStatus"}


def wait_for_success(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Waits for a process that must succeed; returns its outputs."""
    try:
        stdout, stderr = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    return stdout, stderr


def _request_bodies(listener: socket.socket) -> Iterator[bytes]:
    """Yields the bodies of the requests of all closed connections."""
    with suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as file:
                yield file.read().partition(b"\r\n\r\n")[2]
