"""A disk that takes no more, a tracker that fails: a run says so once and keeps a checkpoint that is whole."""

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import Disk, can_mount
from tests.scripts import ENVIRONMENT, ROOT, finish, ran, rows, start, wait_for, without_clocks

pytestmark = pytest.mark.long

SMALL = ("env.num_envs=4", "env.repeats=4")
ITERATIONS = 40
LONG = (*SMALL, f"train.total_dialog_turns={16 * ITERATIONS}", "train.keep_checkpoints=1")
mounts = pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("nsenter") and can_mount()),
    reason="a disk of the test's own cannot be mounted here",
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Room for three of the quickstart's checkpoints."""
    one = Disk(tmp_path / "disk", mib=48)
    yield one
    one.close()


def breaks(disk: Disk, run_dir: Path, fault: str, *overrides: str) -> tuple[int | None, str]:
    """A run of 40 iterations whose disk fails after the third, in no time. Its exit code and what it said."""
    process = start("grpo.py", run_dir, *LONG, *overrides, enter=disk.enter)
    seen = disk.seen(run_dir)
    wait_for(lambda: (seen / "checkpoints" / "checkpoint_000003").exists(), process)
    process.send_signal(signal.SIGSTOP)
    disk.fill() if fault == "full" else disk.make_read_only(run_dir)
    process.send_signal(signal.SIGCONT)
    output = finish(process)
    return process.returncode, output


def resumes(disk: Disk, run_dir: Path) -> str:
    """The same run goes on to its end from a checkpoint, and holds every row once. What it said."""
    process = start("grpo.py", run_dir, *LONG, "train.resume=auto", enter=disk.enter)
    output = finish(process)
    assert process.returncode == 0, output
    seen = disk.seen(run_dir)
    assert [row["optimizer_step"] for row in rows(seen)] == list(range(1, ITERATIONS + 1))
    assert json.loads((seen / "summary.json").read_text())["outcome"] == "finished"
    return output


@mounts
@pytest.mark.parametrize("frequency", [1, 3])
def test_a_disk_that_is_full_stops_the_run_with_a_checkpoint(
    frequency: int, disk: Disk, tmp_path: Path
) -> None:
    """With a checkpoint each iteration that is what finds no room; else metrics, events or the ledger."""
    run_dir = disk.place / "run"
    code, output = breaks(disk, run_dir, "full", f"train.checkpoint_frequency={frequency}")
    assert code == 2, output
    assert output.count("error: ") == 1
    assert f"error: no space is left to write {run_dir}" in output
    assert "Traceback" not in output
    assert output.count("warning: ") <= 3  # one each for the events, the ledger and the report
    seen = disk.seen(run_dir)
    assert all(json.loads(line) for line in (seen / "metrics.jsonl").read_text().splitlines())
    disk.empty()
    assert "resumed from" in resumes(disk, run_dir)


@mounts
def test_a_folder_that_becomes_read_only_stops_the_run_with_a_checkpoint(disk: Disk, tmp_path: Path) -> None:
    run_dir = disk.place / "run"
    code, output = breaks(disk, run_dir, "read-only", "train.checkpoint_frequency=3")
    assert code == 2, output
    assert output.count("error: ") == 1
    assert f"error: nothing more can be written in {run_dir} (Read-only file system)" in output
    assert "Traceback" not in output
    assert output.count("warning: ") <= 3
    disk.make_writable(run_dir)
    assert "resumed from" in resumes(disk, run_dir)


@mounts
def test_a_run_whose_disk_failed_goes_on_elsewhere(disk: Disk, tmp_path: Path) -> None:
    run_dir, elsewhere = disk.place / "run", tmp_path / "elsewhere"
    breaks(disk, run_dir, "read-only", "train.checkpoint_frequency=1")
    more = ("train.checkpoint_frequency=0", f"train.resume={run_dir}")
    process = start("grpo.py", elsewhere, *LONG, *more, enter=disk.enter)
    output = finish(process)
    assert process.returncode == 0, output
    assert f"resumed from {run_dir}" in output
    assert [row["optimizer_step"] for row in rows(elsewhere)] == list(range(1, ITERATIONS + 1))


TRACKERS = {
    "raises": "def metrics(self, numbers, step):\n    raise ConnectionError('gone')\nTensorBoard.metrics = metrics\n",
    "hangs": "TensorBoard.metrics = lambda self, numbers, step: time.sleep(600)\n",
    "hangs at its end": "TensorBoard.close = lambda self, outcome: time.sleep(600)\n",
    "does not open": "TensorBoard.__init__ = lambda self, *settings: open('/no/such/file')\n",
}
SAID = {
    "raises": "failed, metrics.jsonl goes on: ConnectionError: gone",
    "hangs": "does not take what it is sent, 8 rows wait",
    "hangs at its end": "did not end within 1 s and is left behind",
    "does not open": "cannot be used, metrics.jsonl goes on: FileNotFoundError",
}
STEPS = (*SMALL, "train.total_dialog_turns=320", "train.checkpoint_frequency=0")


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("untracked") / "run"
    process = ran("grpo.py", run_dir, *STEPS)
    output = process.output
    assert process.returncode == 0, output
    return run_dir


@pytest.mark.parametrize("fault", TRACKERS)
def test_a_tracker_never_hurts_a_run(fault: str, untracked: Path, tmp_path: Path) -> None:
    """It ends well, says so once, and its rows are those of a run without a tracker."""
    run_dir, script = tmp_path / "run", tmp_path / "with_a_bad_tracker.py"
    script.write_text(
        f"import runpy, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from torchgrpo.monitoring import tracking\nfrom torchgrpo.monitoring.trackers.tensorboard import TensorBoard\n"
        "tracking.CLOSE_S, tracking.QUEUED = 1.0, 8\n"
        f"{TRACKERS[fault]}runpy.run_path('grpo.py', run_name='__main__')\n"
    )
    process = start(str(script), run_dir, *STEPS, "logging.backend=tensorboard")
    output = finish(process)
    assert process.returncode == 0, output
    assert output.count(f"warning: tensorboard (logging.backend) {SAID[fault]}") == 1
    assert output.count("warning: ") <= 3
    assert "Traceback" not in output
    assert without_clocks(rows(run_dir)) == without_clocks(rows(untracked))
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "finished"
    assert (run_dir / "checkpoints" / "checkpoint_000020").is_dir()


def test_a_run_goes_on_without_the_server_of_wandb(untracked: Path, tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "with_less_patience.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from torchgrpo.monitoring.trackers import wandb\nwandb.REACH_S = 1.0\n"
        "runpy.run_path('grpo.py', run_name='__main__')\n"
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        ours = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("WANDB_")}
        environment = ours | {
            "HOME": str(tmp_path),
            "WANDB_BASE_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "WANDB_API_KEY": "a" * 40,
            "WANDB_ERROR_REPORTING": "false",
        }
        options = (*STEPS, "logging.backend=wandb", "logging.mode=online")
        process = start(str(script), run_dir, *options, environment=environment)
        output = finish(process)
    assert process.returncode == 0, output
    assert output.count("logging.mode=online: W&B cannot be used") == 1
    assert "Traceback" not in output
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert without_clocks(rows(run_dir)) == without_clocks(rows(untracked))
