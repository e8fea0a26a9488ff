"""Tests of `run=report`, and of the report that a run writes during and after training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo
from config.schema.errors import ConfigError
from tests.reports.synthetic_run import RunSpec, write_run_folder
from tests.script_runner import ROOT, compose_run_config
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.report_writer import ReportWriter

SMALL = RunSpec(steps=3, evaluate=0)


def run_report_job(tmp_path: Path, run_dir: object) -> None:
    """Runs `run=report` and checks that the job removes its own folder."""
    config = compose_run_config()
    config.run, config.run_dir = "report", run_dir
    (tmp_path / "own").mkdir(exist_ok=True)
    run_job(config, tmp_path / "own", grpo.train, LockstepRun)
    assert not (tmp_path / "own").exists()


def test_job_writes_the_page_and_prints_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run_folder(tmp_path / "sweep" / name, SMALL) for name in ("0", "1")]
    for run_dir, page in (
        (str(runs[0]), runs[0] / "report.html"),
        ([str(run) for run in runs], runs[0] / "comparison.html"),
        (str(tmp_path / "sweep"), tmp_path / "sweep" / "report.html"),
    ):
        run_report_job(tmp_path, run_dir)
        assert capsys.readouterr().out.strip() == str(page)
        assert page.read_bytes().startswith(b"<!doctype html>")
    with pytest.raises(ConfigError, match="run_dir="):
        run_report_job(tmp_path, str(tmp_path / "nowhere"))


def test_unwritable_report_is_one_message(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", SMALL)
    (run / "report.html").mkdir()  # root may write to a read-only folder
    with pytest.raises(ConfigError, match=r"run_dir=.*: the report cannot be written \(.*: Is a directory\)"):
        run_report_job(tmp_path, str(run))


def test_running_run_writes_the_page_in_another_process(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", SMALL)
    messages: list[str] = []
    writer = ReportWriter(run, messages.append)
    writer.renew()
    assert writer._writer is not None and writer._writer.wait(900) == 0
    assert (run / "report.html").is_file()
    writer.finish()
    assert messages == [] and b"synthetic_run" not in (run / "report.html").read_bytes()


def test_slow_report_is_not_written_again_soon(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", SMALL)
    writer = ReportWriter(run, print)
    writer.renew()
    assert writer._writer is not None and writer._writer.wait(900) == 0
    first = writer._writer
    os.utime(run / "report.html", (writer._start_time + 100, writer._start_time + 100))
    writer.renew()
    assert writer._writer is first
    os.utime(run / "report.html", (writer._start_time + 1e-6, writer._start_time + 1e-6))
    writer.renew()
    assert writer._writer is not first
    writer.finish()


def test_failure_is_one_warning(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", SMALL)
    (run / "rollouts" / "train_000001.jsonl.zst").write_bytes(b"broken")
    messages: list[str] = []
    ReportWriter(run, messages.append).finish()
    (line,) = messages
    assert line.startswith(f"warning: {run / 'report.html'} could not be written (ZstdError")


def test_folder_without_metrics_gets_no_report(tmp_path: Path) -> None:
    ReportWriter(tmp_path, pytest.fail).finish()
    assert list(tmp_path.iterdir()) == []


def test_report_imports_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'ray'} & set(sys.modules)"
    command = f"import sys, torchgrpo.reports.__main__, torchgrpo.reports.sweep_report; print(sorted({heavy}))"
    process = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
