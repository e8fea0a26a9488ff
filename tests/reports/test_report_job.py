"""`run=report`, and the report that a run writes beside itself and at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo
from config.schema.errors import ConfigError
from tests.reports.made_run import Made, make_run
from tests.scripts import ROOT, configured
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.report_writer import ReportWriter

SMALL = Made(steps=3, evaluate=0)


def reported(tmp_path: Path, given: object) -> None:
    config = configured()
    config.run, config.run_dir = "report", given
    (tmp_path / "own").mkdir(exist_ok=True)
    run_job(config, tmp_path / "own", grpo.train, Lockstep)
    assert not (tmp_path / "own").exists()


def test_the_job_writes_the_page_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "sweep" / name, SMALL) for name in ("0", "1")]
    for given, page in (
        (str(runs[0]), runs[0] / "report.html"),
        ([str(run) for run in runs], runs[0] / "comparison.html"),
        (str(tmp_path / "sweep"), tmp_path / "sweep" / "report.html"),
    ):
        reported(tmp_path, given)
        assert capsys.readouterr().out.strip() == str(page)
        assert page.read_bytes().startswith(b"<!doctype html>")
    with pytest.raises(ConfigError, match="run_dir="):
        reported(tmp_path, str(tmp_path / "nowhere"))


def test_a_run_that_only_may_be_read_is_one_message(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", SMALL)
    (run / "report.html").mkdir()  # root may write into a folder that is read-only
    with pytest.raises(ConfigError, match=r"run_dir=.*: the report cannot be written \(.*: Is a directory\)"):
        reported(tmp_path, str(run))


def test_beside_a_run_the_page_is_made_by_another_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", SMALL)
    told: list[str] = []
    writer = ReportWriter(run, told.append)
    writer.renew()
    assert writer._writer is not None and writer._writer.wait(900) == 0
    assert (run / "report.html").is_file()
    writer.finish()
    assert told == [] and b"made_run" not in (run / "report.html").read_bytes()


def test_a_page_that_took_long_is_not_made_again_soon(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", SMALL)
    writer = ReportWriter(run, print)
    writer.renew()
    assert writer._writer is not None and writer._writer.wait(900) == 0
    first = writer._writer
    os.utime(run / "report.html", (writer._begun + 100, writer._begun + 100))
    writer.renew()
    assert writer._writer is first
    os.utime(run / "report.html", (writer._begun + 1e-6, writer._begun + 1e-6))
    writer.renew()
    assert writer._writer is not first
    writer.finish()


def test_a_failure_is_one_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", SMALL)
    (run / "rollouts" / "train_000001.jsonl.zst").write_bytes(b"broken")
    told: list[str] = []
    ReportWriter(run, told.append).finish()
    (line,) = told
    assert line.startswith(f"warning: {run / 'report.html'} could not be written (ZstdError")


def test_nothing_is_written_where_nothing_was_measured(tmp_path: Path) -> None:
    ReportWriter(tmp_path, pytest.fail).finish()
    assert list(tmp_path.iterdir()) == []


def test_a_report_costs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'ray'} & set(sys.modules)"
    command = f"import sys, torchgrpo.reports.__main__, torchgrpo.reports.sweep; print(sorted({heavy}))"
    told = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "[]"
