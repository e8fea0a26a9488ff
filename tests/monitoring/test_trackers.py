"""metrics.jsonl survives a crash in mid-line; W&B goes offline where it cannot be reached."""

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
from tests.scripts import ENVIRONMENT, ROOT, begin
from torchgrpo.monitoring.metrics_file import MetricsFile
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.monitoring.progress import Progress
from torchgrpo.monitoring.trackers.wandb import Wandb
from torchgrpo.monitoring.tracking import make_tracker


@pytest.mark.long
def test_every_run_of_a_sweep_is_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    seen = []
    close = Wandb.close

    def noted(self: Wandb, outcome: RunOutcome) -> None:
        seen.append((self.logger.experiment.id, dict(self.logger.experiment.config)["train"]["seed"]))
        close(self, outcome)

    monkeypatch.setattr(Wandb, "close", noted)
    for seed in (3, 4):
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        settings = LoggingConfig(backend="wandb", mode="offline", progress=False)
        tracker = make_tracker(settings, run_dir, {"train": {"seed": seed}})
        Monitor(run_dir, tracker, live=Progress(settings, total_steps=1)).close("finished")
    assert seen[0][0] != seen[1][0]
    assert [seed for _, seed in seen] == [3, 4]
    assert len(list(tmp_path.rglob("*.wandb"))) == 2


def test_no_backend_is_no_tracker(tmp_path: Path) -> None:
    assert make_tracker(LoggingConfig(backend="none"), tmp_path, {}) is None


BAD_LINES = {
    "half a line": b'{"optimizer_step": 4, "rew',
    "ends like a row": b'{"optimizer_step": 4, "x": {"y": 1}',
    "no JSON": b"garbage}",
    "no UTF-8": b'{"optimizer_step": 4, "x": "\xff\xfe"}',
    "zeros": bytes(4096),
    "nested without end": b"[" * 100_000 + b"}",
    "no row": b'"}"',
    "no step": b'{"step": 4}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("last", [True, False])
def test_a_line_that_is_no_row_is_left_out_when_a_run_continues(
    line: bytes, last: bool, tmp_path: Path
) -> None:
    """The last one, which a crash cut, without a word; one between others with a message that names it."""
    folders = tmp_path / "earlier", tmp_path / "continued"
    for folder in folders:
        folder.mkdir()
    earlier, continued = (MetricsFile(folder / "metrics.jsonl") for folder in folders)
    for step in (1, 2):
        earlier.append({"optimizer_step": step, "reward/mean": step / 10})
    with earlier.path.open("ab") as file:
        file.write(line if last else line + b"\n")
    if not last:
        earlier.append({"optimizer_step": 3})
    told = continued.continue_from(folders[0], optimizer_steps=2)
    assert continued.rows() == [
        {"optimizer_step": 1, "reward/mean": 0.1},
        {"optimizer_step": 2, "reward/mean": 0.2},
    ]
    assert continued.path.read_bytes().endswith(b"}\n")
    text = f"{earlier.path}: 1 lines are no rows of metrics and are left out (line 3)"
    assert told == ([] if last else [text])


def test_a_row_after_half_a_line_is_a_line_of_its_own(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text('{"optimizer_step": 1, "rew')
    assert metrics.continue_from(tmp_path, optimizer_steps=5) == []
    metrics.append({"optimizer_step": 1})
    assert metrics.path.read_text() == '{"optimizer_step": 1}\n'


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_half_of_it(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the kernel takes a part and refuses the rest."""
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


ONLINE = """
import sys
from pathlib import Path
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring import tracking
from torchgrpo.monitoring.trackers import wandb

wandb.REACH_S = 1.0  # not the 12 of a run
tracker = tracking.make_tracker(LoggingConfig(backend="wandb", mode="online"), Path(sys.argv[1]), {})
tracker.metrics({"reward/mean": 0.5}, 1)
tracker.close("finished")
print("\\n".join(tracker.told()), file=sys.stderr)
"""


def online(server: str, folder: Path, port: int) -> subprocess.Popen[str]:
    ours = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("WANDB_")}
    environment = ours | {
        "NETRC": str(folder / "netrc"),  # no key of the user's
        "WANDB_CONFIG_DIR": str(folder),
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_ERROR_REPORTING": "false",
    }
    if server == "no key":
        del environment["WANDB_API_KEY"]
    script = folder / "online.py"
    script.write_text(ONLINE)
    return begin([str(script), str(folder)], environment=environment)


@pytest.mark.parametrize(
    "server",
    [
        "no key",
        pytest.param("refuses", marks=pytest.mark.long),
        pytest.param("never answers", marks=pytest.mark.long),
    ],
)
def test_wandb_goes_offline_where_it_cannot_be_reached(server: str, tmp_path: Path) -> None:
    """A server that never answers is asked nothing but for the run: other questions have their own deadlines."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "never answers":
            listener.listen(50)
        _, stderr = finished(online(server, tmp_path, listener.getsockname()[1]))
        assert stderr.count("logging.mode=online: W&B cannot be used") == 1
        assert "warning" not in stderr
        assert "Traceback" not in stderr
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        if server == "never answers":
            listener.setblocking(False)
            assert {json.loads(body)["operationName"] for body in _sent_to(listener)} == {"RunResumeStatus"}


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Both outputs of a process that must end well."""
    try:
        stdout, stderr = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    return stdout, stderr


def _sent_to(listener: socket.socket) -> Iterator[bytes]:
    """The bodies of the requests of those that connected, and have ended."""
    with suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as file:
                yield file.read().partition(b"\r\n\r\n")[2]
