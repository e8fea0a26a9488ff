"""Full or read-only disks and failing trackers: one message, and a complete checkpoint remains."""

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.run_folder.checkpoints import checkpoint_iteration, newest_checkpoint
from tests.disks import Disk, can_mount
from tests.script_runner import (
    ENVIRONMENT,
    ROOT,
    read_metrics,
    run_script,
    start_script,
    wait_for_output,
    wait_until,
    without_timings,
)

pytestmark = pytest.mark.long

SMALL = ("env.num_envs=4", "env.repeats=4")
LONG = (*SMALL, "train.keep_checkpoints=1")
ENDLESS = "train.total_dialog_turns=1600000"
"""Total of a run that only the disk fault ends."""
MORE_STEPS = 5
"""Steps of a resumed run after the last one that was logged before it."""
needs_mount = pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("nsenter") and can_mount()),
    reason="a disk of the test's own cannot be mounted here",
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Disk with room for three checkpoints of the quickstart."""
    small_disk = Disk(tmp_path / "disk", mib=48)
    yield small_disk
    small_disk.close()


def run_until_disk_fault(disk: Disk, run_dir: Path, fault: str, *overrides: str) -> tuple[int | None, str]:
    """Runs until a disk fault after the third iteration; returns exit code and output.

    The process is stopped during the change, so the fault appears at once.
    """
    process = start_script("grpo.py", run_dir, *LONG, ENDLESS, *overrides, enter=disk.enter)
    host_run_dir = disk.host_path(run_dir)
    wait_until(lambda: newest_iteration(host_run_dir) >= 3, process)  # the third itself may be removed by then
    process.send_signal(signal.SIGSTOP)
    disk.fill() if fault == "full" else disk.make_read_only(run_dir)
    process.send_signal(signal.SIGCONT)
    output = wait_for_output(process)
    return process.returncode, output


def newest_iteration(run_dir: Path) -> int:
    """Returns the iteration of the newest checkpoint, or 0 without one."""
    path = newest_checkpoint(run_dir)
    return 0 if path is None else checkpoint_iteration(path)


def finite_total(host_run_dir: Path) -> tuple[str, list[int]]:
    """Returns the setting of a total that a stopped run can reach, and all steps."""
    num_steps = int(read_metrics(host_run_dir)[-1]["optimizer_step"]) + MORE_STEPS
    return f"train.total_dialog_turns={16 * num_steps}", list(range(1, num_steps + 1))


def resume_run(disk: Disk, run_dir: Path) -> str:
    """Resumes and finishes the run, checks its metrics rows, and returns its output."""
    host_run_dir = disk.host_path(run_dir)
    total, steps = finite_total(host_run_dir)
    process = start_script("grpo.py", run_dir, *LONG, total, "train.resume=auto", enter=disk.enter)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert [row["optimizer_step"] for row in read_metrics(host_run_dir)] == steps
    assert json.loads((host_run_dir / "summary.json").read_text())["outcome"] == "finished"
    return output


@needs_mount
@pytest.mark.parametrize("frequency", [1, 3])
def test_a_full_disk_stops_the_run_with_a_checkpoint(frequency: int, disk: Disk, tmp_path: Path) -> None:
    """The checkpoint fails, or the metrics, events or ledger if checkpoints are rarer."""
    run_dir = disk.place / "run"
    code, output = run_until_disk_fault(disk, run_dir, "full", f"train.checkpoint_frequency={frequency}")
    assert code == 2, output
    assert output.count("error: ") == 1
    assert f"error: {run_dir}: no space is left to write the run's folder" in output
    assert "Traceback" not in output
    assert output.count("warning: ") <= 3  # one each for the events, the ledger and the report
    host_run_dir = disk.host_path(run_dir)
    assert all(json.loads(line) for line in (host_run_dir / "metrics.jsonl").read_text().splitlines())
    disk.remove_filler()
    assert "resumed from" in resume_run(disk, run_dir)


@needs_mount
def test_a_folder_that_becomes_read_only_stops_the_run_with_a_checkpoint(disk: Disk, tmp_path: Path) -> None:
    run_dir = disk.place / "run"
    code, output = run_until_disk_fault(disk, run_dir, "read-only", "train.checkpoint_frequency=3")
    assert code == 2, output
    assert output.count("error: ") == 1
    assert f"error: {run_dir}: the run's folder cannot be written any more (Read-only file system)" in output
    assert "Traceback" not in output
    assert output.count("warning: ") <= 3
    disk.make_writable(run_dir)
    assert "resumed from" in resume_run(disk, run_dir)


@needs_mount
def test_a_run_whose_disk_failed_resumes_in_another_folder(disk: Disk, tmp_path: Path) -> None:
    run_dir, other_dir = disk.place / "run", tmp_path / "elsewhere"
    run_until_disk_fault(disk, run_dir, "read-only", "train.checkpoint_frequency=1")
    total, steps = finite_total(disk.host_path(run_dir))
    more = (total, "train.checkpoint_frequency=0", f"train.resume={run_dir}")
    process = start_script("grpo.py", other_dir, *LONG, *more, enter=disk.enter)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert f"resumed from {run_dir}" in output
    assert [row["optimizer_step"] for row in read_metrics(other_dir)] == steps


TRACKER_FAULTS = {
    "raises": "def metrics(self, numbers, step):\n    raise ConnectionError('gone')\nTensorBoard.metrics = metrics\n",
    "hangs": "TensorBoard.metrics = lambda self, numbers, step: time.sleep(600)\n",
    "hangs at its end": "TensorBoard.close = lambda self, outcome: time.sleep(600)\n",
    "does not open": "TensorBoard.__init__ = lambda self, *settings: open('/no/such/file')\n",
}
WARNINGS = {
    "raises": "failed, metrics.jsonl is still written: ConnectionError: gone",
    "hangs": "does not accept rows, 8 rows are queued",
    "hangs at its end": "did not close within 1 s and is abandoned",
    "does not open": "cannot be used, only metrics.jsonl is written: FileNotFoundError",
}
STEPS = (*SMALL, "train.total_dialog_turns=320", "train.checkpoint_frequency=0")


@pytest.fixture(scope="module")
def run_without_tracker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("untracked") / "run"
    process = run_script("grpo.py", run_dir, *STEPS)
    output = process.output
    assert process.returncode == 0, output
    return run_dir


@pytest.mark.parametrize("fault", TRACKER_FAULTS)
def test_a_failing_tracker_does_not_change_the_run(fault: str, run_without_tracker: Path, tmp_path: Path) -> None:
    """The run finishes with one warning; its metrics are those without a tracker."""
    run_dir, script = tmp_path / "run", tmp_path / "with_a_bad_tracker.py"
    script.write_text(
        f"import runpy, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from torchgrpo.monitoring import tracker_threads\n"
        "from torchgrpo.monitoring.trackers.tensorboard import TensorBoard\n"
        "tracker_threads.CLOSE_S, tracker_threads.QUEUE_SIZE = 1.0, 8\n"
        f"{TRACKER_FAULTS[fault]}runpy.run_path('grpo.py', run_name='__main__')\n"
    )
    process = start_script(str(script), run_dir, *STEPS, "logging.backend=tensorboard")
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert output.count(f"warning: tensorboard (logging.backend) {WARNINGS[fault]}") == 1
    assert output.count("warning: ") <= 3
    assert "Traceback" not in output
    assert without_timings(read_metrics(run_dir)) == without_timings(read_metrics(run_without_tracker))
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "finished"
    assert (run_dir / "checkpoints" / "checkpoint_000020").is_dir()


def test_a_run_continues_without_the_wandb_server(run_without_tracker: Path, tmp_path: Path) -> None:
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
        process = start_script(str(script), run_dir, *options, environment=environment)
        output = wait_for_output(process)
    assert process.returncode == 0, output
    assert output.count("logging.mode=online: W&B cannot be used") == 1
    assert "Traceback" not in output
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert without_timings(read_metrics(run_dir)) == without_timings(read_metrics(run_without_tracker))
