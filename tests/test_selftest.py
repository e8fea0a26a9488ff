"""Tests of the self-test: checks that work, fail, hang or crash; bodies on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from config.schema.policy import PRESETS
from tests.gpu import long_gpu_checks
from tests.processes import wait_for_exit
from tests.script_runner import ROOT
from torchgrpo.plan.machine import Machine
from torchgrpo.selftest import __main__ as command
from torchgrpo.selftest import engine_checks, learner_checks, main, runner
from torchgrpo.selftest.catalogue import CHECKS
from torchgrpo.selftest.check import Check, CheckResult, CheckWorkspace
from torchgrpo.selftest.child import run_check
from torchgrpo.training.learner import Learner

BODIES = "tests.fake_checks"
LAPTOP = Machine(num_gpus=0, gpu_memory_gib=None, host_memory_gib=16.0, disk_gib=50.0, vllm=None)
ALL_CHECKS = (*CHECKS, *long_gpu_checks.EXTRA)


def fake_check(name: str, **options: object) -> Check:
    return Check(name, f"{BODIES}.{name}", options, remedy="try again")


def ran_in_one_process(statuses: Sequence[CheckResult]) -> bool:
    return len({row.detail.split()[-1] for row in statuses}) == 1


# --- processes ----------------------------------------------------------------------------------------------


def test_a_check_that_dies_takes_only_its_own_row_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ["works", "fails", "works", "dies", "works"]
    first, fails, second, dies, third = runner.run_group([fake_check(name) for name in names])
    assert [row.status for row in (first, second, third)] == ["passed"] * 3
    assert ran_in_one_process([first, second]) and not ran_in_one_process([second, third])
    assert (fails.status, fails.detail) == ("failed", "ArithmeticError: the sum is wrong")
    assert fails.remedy == "try again" and "in fails" in fails.trace
    assert (dies.status, dies.detail) == ("failed", "its process ended with SIGSEGV")
    assert dies.remedy == "try again" and "in dies" in dies.trace
    assert not list(tmp_path.iterdir())


def test_a_check_that_runs_out_of_time_is_killed_with_all_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pids"
    monkeypatch.setattr(runner, "monotonic", lambda: 1e6 if pid_file.exists() else 0.0)
    (row,) = runner.run_group([fake_check("hangs", pid_file=str(pid_file))])
    detail = "ran out of time after 600 s; run it again when the machine is less busy"
    assert (row.status, row.detail, row.remedy) == ("timed out", detail, "")
    for pid in map(int, pid_file.read_text().split()):
        wait_for_exit(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_self_test_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    command = [sys.executable, "-m", BODIES, str(pid_file)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    while not pid_file.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.wait()
    for pid in map(int, pid_file.read_text().split()):
        wait_for_exit(pid)


def test_a_real_check_and_what_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox = next(check for check in CHECKS if check.name == "sandbox")
    assert main.run_selftest(tmp_path, [replace(fake_check("dies"), gpus=64), sandbox]) == 0
    report = json.loads((tmp_path / main.REPORT_FILE).read_text())
    assert [(row["name"], row["status"]) for row in report["checks"]] == [("sandbox", "passed"), ("dies", "skipped")]
    assert report["packages"]["torch"] and report["machine"]["host_memory_gib"] > 0
    assert "passed: 1, failed: 0, timed out: 0, skipped: 1" in capsys.readouterr().out


# --- rows ---------------------------------------------------------------------------------------------------


def test_an_assertion_without_words_is_its_line(tmp_path: Path) -> None:
    row = run_check(fake_check("fails_in_silence"), tmp_path / "bench")
    assert row.detail == 'AssertionError: assert workspace.device == "no such device"'


def test_bad_input_brings_its_own_remedy(tmp_path: Path) -> None:
    row = run_check(fake_check("refuses"), tmp_path / "bench")
    assert (row.status, row.detail) == ("failed", "ray.address=nowhere: no cluster; leave it unset")
    assert row.remedy == ""


def test_a_package_that_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package, not the module of the check that imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_another_version.py").write_text("")
    (tmp_path / "imports_it.py").write_text("from of_another_version import gone")
    row = run_check(Check("an import", "imports_it.inside.works", remedy="try again"), tmp_path / "bench")
    assert (row.status, row.remedy) == ("failed", "")
    assert row.detail.startswith("a package does not load: cannot import name 'gone'")
    assert f"(ImportError in {tmp_path / 'imports_it.py'}, line 1)" in row.detail


def test_checks_run_by_group_and_rows_say_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[list[str]] = []

    def run_group(checks: Sequence[Check]) -> Iterator[CheckResult]:
        groups.append([check.name for check in checks])
        return iter([CheckResult(check.name, "passed", 0.0, "") for check in checks])

    monkeypatch.setattr(runner, "run_group", run_group)
    plain = Check("a", "learner_checks.check_output_head")
    vllm = Check("d", "engine_checks.check_sampling", vllm=True)
    checks = [replace(plain, gpus=2), vllm, *(replace(plain, name=name) for name in "bc")]
    checks.append(Check("e", "training_run_checks.check_run_resume"))
    rows = list(runner.run_checks(checks, LAPTOP, None))
    assert groups == [["b", "c"], ["e"]]
    assert [row.status for row in rows] == ["passed"] * 3 + ["skipped"] * 2
    assert rows[-2].detail == "needs 2 GPUs, this machine shows 0"
    assert "make vllm" in rows[-1].detail
    assert vllm.missing_requirement(LAPTOP, "cpu") is None
    assert "needs the CPU build of vLLM, installed is the CUDA build" in str(vllm.missing_requirement(LAPTOP, "cuda"))


def test_a_line_shows_reason_and_remedy() -> None:
    line = main.format_result(CheckResult("a", "failed", 2.0, "it broke", "mend it"), width=3)
    assert line == "a    failed       2.0 s  it broke\n    remedy: mend it"


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("timed out", 0), ("failed", 1)])
def test_only_what_does_not_work_fails_the_whole(
    status: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "run_checks", lambda *arguments: iter([CheckResult("a", status, 1.0, "because")]))
    assert main.run_selftest(tmp_path) == code
    assert f"{status}: 1" in capsys.readouterr().out


def test_the_command_takes_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(command, "run_selftest", lambda folder: folders.append(folder) or 1)
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 1 and command.main([str(tmp_path / "mine" / "deep")]) == 1
    assert folders == [Path("outputs/selftest"), tmp_path / "mine" / "deep"]
    assert all(folder.is_dir() for folder in folders)


def test_the_command_refuses_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["one", "two"]) == command.main(["--fast"]) == 2
    assert "usage: python -m torchgrpo.selftest [FOLDER]" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    (tmp_path / "file").touch()
    assert command.main([str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} cannot be made" in capsys.readouterr().err


# --- the real checks ----------------------------------------------------------------------------------------


def test_every_check_has_a_name_a_remedy_and_options_that_reach_its_process() -> None:
    assert len({check.name for check in ALL_CHECKS}) == len(ALL_CHECKS)
    assert all(callable(check.function) and check.remedy for check in ALL_CHECKS)
    assert all((check.device == "cuda") == (check.gpus > 0) for check in ALL_CHECKS)
    assert [Check(**json.loads(json.dumps(asdict(check)))) for check in ALL_CHECKS] == list(ALL_CHECKS)


IN_THIS_PROCESS = [
    "output head, CPU",
    "fp16, CPU",
    "reference homes, CPU",
    pytest.param("two learner ranks, CPU", marks=pytest.mark.long),
    "resume, CPU",
]
ENGINES = [pytest.param("push in mid-flight, CPU", marks=pytest.mark.long)] if main.vllm_build() == "cpu" else []


@pytest.mark.long
@pytest.mark.parametrize("name", [*IN_THIS_PROCESS, *ENGINES])
def test_it_works(name: str, tmp_path: Path) -> None:
    (check,) = (check for check in CHECKS if check.name == name)
    assert check.function(CheckWorkspace(tmp_path), **check.options)


@pytest.mark.long
def test_objectives_and_a_fault_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check finds a learner whose gradient is scaled wrongly for packed rows."""
    assert f"{len(list(PRESETS.glob('*.yaml')))} presets" in learner_checks.check_presets(CheckWorkspace(tmp_path))
    plain = learner_checks.run_step

    def faulty(config, workspace, batch):  # type: ignore[no-untyped-def]
        metrics, gradient = plain(config, workspace, batch)
        return metrics, gradient * (1.01 if config.train.packing else 1)

    monkeypatch.setattr(learner_checks, "run_step", faulty)
    with pytest.raises(AssertionError, match="gradient or loss differs"):
        learner_checks.check_presets(CheckWorkspace(tmp_path))


@pytest.mark.long
def test_bodies_of_gpu_checks(tmp_path: Path) -> None:
    workspace = CheckWorkspace(tmp_path)
    assert learner_checks.check_learner_resume(workspace) == "cpu, CPU"
    long_gpu_checks.check_step_memory(workspace)
    assert "TFLOPS" in long_gpu_checks.check_head_speed(
        workspace, width=128, vocabulary=512, rows=4, length=8, share=0.0
    )
    overrides = ["inference_model.backend=transformers"]
    assert engine_checks.check_shared_gpu(workspace, overrides) == "no GPU memory to release"


def test_a_check_that_fails_closes_its_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Learner] = []

    def fails(*arguments: object, **options: object) -> None:
        raise AssertionError("in the middle")

    monkeypatch.setattr(learner_checks, "perturb_weights", fails)
    monkeypatch.setattr(Learner, "close", lambda self: closed.append(self))
    with pytest.raises(AssertionError, match="in the middle"):
        learner_checks.check_reference_placements(CheckWorkspace(tmp_path), ["host memory"])
    assert len(closed) == 2, "the learners of the rollouts and of the check"
