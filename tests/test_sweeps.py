"""Sweeps as a user starts them: every launcher, a study of Optuna's, jobs that fail, Ctrl-C."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from threading import Event

import psutil
import pytest
from omegaconf import OmegaConf

from config.sweep_jobs import LAST_STEPS, STOPPED, objective
from run.sweep import WIDTH, SweepStop, SweptJob, table
from tests.processes import family
from tests.scripts import ENVIRONMENT, QUICK, ROOT, begin, called, ended, finish, rows, wait_for

pytestmark = pytest.mark.long

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32", "optimizer.warmup_steps=0")
LONG = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=1600000", "train.checkpoint_frequency=0")
TOO_LONG = "inference_model.max_tokens=8,1000000,9"
"""Completions of the second job do not fit into the model: it is refused after the first one has ended."""
LAUNCHERS = {
    "basic": "hydra",
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "ray": "hydra_plugins.hydra_ray_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
}


def sweep(folder: Path, *overrides: str, cwd: Path) -> subprocess.Popen[str]:
    """Away from the checkout. Jobs of joblib and submitit begin in new interpreters."""
    command = [str(ROOT / "grpo.py"), "--config-name", "grpo_quickstart", "--multirun"]
    return begin([*command, f"hydra.sweep.dir={folder}", *QUICK, *overrides], cwd, stderr=subprocess.STDOUT)


def outcomes(folder: Path) -> dict[str, str]:
    found = folder.glob("*/summary.json")
    return {path.parent.name: json.loads(path.read_text())["outcome"] for path in found}


def table_of(output: str) -> list[str]:
    lines = output.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("job  overrides")]
    return [
        line for line in lines[at - 1 :] if re.match(r"\d+ |job |failed |  +\S", line)
    ]  # Ray says more below


def foreign_listeners(process: subprocess.Popen[str]) -> Iterator[str]:
    """Addresses other than loopback on which the process or one below it listens now."""
    for one in family(process.pid):
        with suppress(psutil.NoSuchProcess):
            for link in one.net_connections("inet"):
                if link.status == psutil.CONN_LISTEN and "127.0.0.1" not in link.laddr.ip:
                    yield f"{one.name()} on {link.laddr}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failed_job_loses_no_other(launcher: str, tmp_path: Path) -> None:
    """By every launcher: each job has a folder with all that is its own, nothing listens beyond loopback."""
    pytest.importorskip(LAUNCHERS[launcher])
    folder = tmp_path / "sweep"
    jobs = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    process = sweep(folder, f"hydra/launcher={launcher}", *jobs, *SMALL, TOO_LONG, cwd=tmp_path)
    seen: set[str] = set()
    while process.poll() is None and not (folder / "summary.csv").exists():
        seen |= set(foreign_listeners(process))
        time.sleep(0.3)
    output = finish(process)
    assert not seen
    assert process.returncode == 1, output
    assert outcomes(folder) == {"0": "finished", "1": "failed", "2": "finished"}
    assert all(len(rows(folder / job)) == 2 for job in ("0", "2"))
    assert not (folder / "1" / "metrics.jsonl").exists()
    assert "Traceback" not in output
    told = table_of(output)
    assert all(len(line) <= WIDTH for line in told[1:])  # the folder is as long as it is
    assert told[0].startswith("3 jobs, 2 finished: ")
    assert [line.split()[:3] for line in told[2:5]] == [
        ["0", "inference_model.max_tokens=8", "finished"],
        ["1", "inference_model.max_tokens=1000000", "failed"],
        ["2", "inference_model.max_tokens=9", "finished"],
    ]
    assert told[5].startswith("failed 1: prompt plus response may reach")
    with (folder / "summary.csv").open() as file:
        swept = list(csv.DictReader(file))
    assert [row["inference_model.max_tokens"] for row in swept] == ["8", "1000000", "9"]
    assert float(swept[2]["last_reward"]) == rows(folder / "2")[-1]["reward/mean"]


def test_a_study_goes_on_after_failed_trials(tmp_path: Path) -> None:
    """Of four trials some are refused; the best one is that with the highest objective, for it is maximised."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    result = ended(
        [
            *("grpo.py", "--config-name", "grpo_quickstart", "--multirun", f"hydra.sweep.dir={tmp_path}"),
            *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1"),
            *("hydra.sweeper.n_jobs=1", "optimizer.lr=tag(log,interval(1e-5,1e-3))"),
            *("inference_model.max_tokens=choice(8,1000000)", *QUICK, *SMALL),
        ]
    )
    assert result.returncode == 1, result.stderr
    ran = outcomes(tmp_path)
    assert sorted(ran) == ["0", "1", "2", "3"]
    assert set(ran.values()) == {"finished", "failed"}
    found = OmegaConf.load(tmp_path / "optimization_results.yaml")
    objectives = [objective(tmp_path / job, None) for job, outcome in ran.items() if outcome == "finished"]
    assert found.best_value == max(value for value in objectives if value is not None)
    assert found.best_params["inference_model.max_tokens"] == 8


def test_a_study_of_failures_alone_is_one_message(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    result = ended(
        [
            *("grpo.py", "--config-name", "grpo_quickstart", "--multirun", f"hydra.sweep.dir={tmp_path}"),
            *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "inference_model.max_tokens=1000000"),
            *("optimizer.lr=interval(1e-5,1e-3)", *QUICK, *SMALL),
        ]
    )
    assert result.returncode == 1
    assert "error: every trial of the study failed" in result.stderr
    assert "Traceback" not in result.stderr
    assert outcomes(tmp_path) == {"0": "failed", "1": "failed"}


FAULTY = """
from config.command_line import command_line
from run.sweep import summed_up

def job(config, run_dir, begun):
    begun()
    if config.train.seed == 0:
        raise ZeroDivisionError("by 0")
    (run_dir / "summary.json").write_text('{"outcome": "finished"}')
    return "finished"

with summed_up():
    command_line(job)
"""


def swept(folder: Path, script: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A sweep with a script of the test's own, in folder/sweep."""
    (folder / "own.py").write_text(script)
    command = [str(folder / "own.py"), "--config-name", "grpo_quickstart", "--multirun", *overrides]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return ended([*command, f"hydra.sweep.dir={folder / 'sweep'}"], environment=environment)


def test_a_fault_in_a_job_is_told_and_loses_no_other(tmp_path: Path) -> None:
    """Something that no message was written for: its traceback is printed, and the next job begins."""
    result = swept(tmp_path, FAULTY, "train.seed=0,1")
    assert result.returncode == 1, result.stderr
    assert outcomes(tmp_path / "sweep") == {"0": "failed", "1": "finished"}
    assert "in job\n" in result.stderr and "ZeroDivisionError: by 0" in result.stderr
    assert "failed 0: ZeroDivisionError: by 0" in result.stdout


REFUSING = """
from config.command_line import command_line
from config.errors import ConfigError
from run.sweep import summed_up

def job(config, run_dir, begun):
    if (run_dir / "metrics.jsonl").exists():
        raise ConfigError("there is an earlier run")
    begun()
    (run_dir / "metrics.jsonl").touch()
    (run_dir / "summary.json").write_text('{"outcome": "finished"}')
    return "finished"

with summed_up():
    command_line(job)
"""


def test_a_sweep_in_the_folder_of_another_leaves_its_runs_as_they_are(tmp_path: Path) -> None:
    """It tells of its own jobs alone."""
    folder = tmp_path / "sweep"
    first = swept(tmp_path, REFUSING, "train.seed=7,8,9")
    assert first.returncode == 0, first.stderr

    def kept() -> dict[Path, str]:
        """Less the log, in which the refusal stands."""
        files = [path for path in (folder / "0").rglob("*") if path.is_file() and path.name != "grpo.log"]
        return {path: path.read_text() for path in files}

    before = kept()
    shutil.rmtree(folder / "1")
    (folder / "2" / "summary.json").write_text('{"outcome": "failed", "error": "of the first sweep"}')
    again = swept(tmp_path, REFUSING, "train.seed=10,11")
    assert again.returncode == 1, again.stderr
    assert kept() == before and len(before) == 5
    told = table_of(again.stdout)
    assert told[0].startswith("2 jobs, 1 finished: ")
    assert [line.split()[:3] for line in told[2:4]] == [
        ["0", "train.seed=10", "refused"],
        ["1", "train.seed=11", "finished"],
    ]
    assert "refused 0: there is an earlier run" in again.stdout
    assert "of the first sweep" not in again.stdout


def test_a_study_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    if version("sqlalchemy").startswith("1."):
        pytest.skip("SQLAlchemy 1 stores studies")
    study = (f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db", "hydra.sweeper.study_name=rates")
    result = called("grpo.py", "--multirun", "hydra/sweeper=optuna", f"hydra.sweep.dir={tmp_path}", *study)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 1 and "pip install 'sqlalchemy<2'" in result.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hydra.sweeper.direction=up", "direction=up: a run has one objective; take maximize or minimize"),
        ("hydra.sweeper.n_jobs=0", "hydra.sweeper.n_jobs=0: must be at least 1"),
        (
            "optimizer.lr=interval(1e-3,1e-5)",
            "smaller than or equal to the `high` value (low=0.001, high=1e-05)",
        ),
        (
            "optimizer.lr=tag(log,interval(0,1))",
            "interval(low, high) of the sweep: The `low` value must be larger",
        ),
    ],
)
def test_a_study_that_makes_no_sense_is_one_message(override: str, expected: str, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    study = ("hydra/sweeper=optuna", f"hydra.sweep.dir={tmp_path}", "hydra.sweeper.n_trials=1", override)
    result = called("grpo.py", "--multirun", *study)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 1 and expected in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("launcher", ["joblib", "ray"])
def test_an_interrupt_reaches_the_jobs_in_other_processes(launcher: str, tmp_path: Path) -> None:
    """One signal to the process that waits: each running job writes its checkpoint, the third never begins. Ray does
    not say which two of three it begins with."""
    pytest.importorskip(LAUNCHERS[launcher])
    folder = tmp_path / "sweep"
    side_by_side = {"joblib": "hydra.launcher.n_jobs=2", "ray": "+hydra.launcher.ray.init.num_cpus=2"}
    chosen = (f"hydra/launcher={launcher}", side_by_side[launcher])
    process = sweep(folder, *chosen, *LONG, "train.seed=0,1,2", cwd=tmp_path)

    def running() -> list[str]:
        return [job for job in "012" if (folder / job / "metrics.jsonl").exists()]

    wait_for(lambda: len(running()) == 2, process)
    _, *below = family(process.pid)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert outcomes(folder) == dict.fromkeys(running(), "interrupted") and len(running()) == 2
    assert (folder / STOPPED).exists(), "a worker that Ray is still starting must not begin the third"
    assert all(len(list((folder / job / "checkpoints").iterdir())) == 1 for job in running())
    assert f"{ROOT / 'grpo.py'} --config-name grpo_quickstart" in output  # the command that goes on
    assert table_of(output)[0].startswith("2 jobs, 0 finished: ")
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not alive


JOB = """
import signal, sys, time
from pathlib import Path
from config.folders import held
folder = Path(sys.argv[1])
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
with held(folder):
    while not told:
        time.sleep(0.05)
    (folder / "told").touch()
    while not (folder.parent / "late" / "told").exists():
        time.sleep(0.05)
    time.sleep(0.5)
print(len(told))
"""


def test_a_job_that_begins_as_the_signal_comes_is_told_once_too(tmp_path: Path) -> None:
    with ExitStack() as undo:
        stop, over = SweepStop(folder=tmp_path), Event()
        before = signal.signal(signal.SIGINT, lambda number, frame: over.set())
        undo.callback(signal.signal, signal.SIGINT, before)

        def job(name: str) -> subprocess.Popen[str]:
            (tmp_path / name).mkdir()
            command = [sys.executable, "-c", JOB, str(tmp_path / name)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            undo.callback(process.kill)
            return process

        early = job("early")
        while not stop.owners():
            time.sleep(0.05)
        stop.heed(signal.SIGINT)
        jobs = early, job("late")
        assert [process.communicate(timeout=60)[0] for process in jobs] == ["1\n", "1\n"]
        assert over.wait(20) and stop.over


def test_the_objective(tmp_path: Path) -> None:
    """The first set's last pass@1; without one the mean reward of the last steps; None where there is no number."""
    assert objective(tmp_path, None) is None
    summary, metrics = tmp_path / "summary.json", tmp_path / "metrics.jsonl"
    rewards = [{"reward/mean": step / 16} for step in range(LAST_STEPS + 5)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in [*rewards, {"eval/easy/pass@1": 0.5}]))
    summary.write_text(json.dumps({"evaluation": {}}))
    assert objective(tmp_path, None) == (5 + LAST_STEPS + 4) / 2 / 16
    of_two = {"eval/easy/problems": 4.0, "eval/easy/pass@1": 0.25, "eval/hard/pass@1": 0.75}
    summary.write_text(json.dumps({"evaluation": of_two}))
    assert objective(tmp_path, None) == 0.25
    assert objective(tmp_path, "eval/hard/pass@1") == 0.75
    summary.write_text(json.dumps({"evaluation": {"eval/easy/pass@1": float("nan")}}))
    assert objective(tmp_path, None) is None


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    """Overrides that all jobs share are left out, long ones are broken, reasons are told once."""
    long = {"env.system_prompt": '"' + "very " * 30 + '"', "train.seed": "1"}
    refused = {"outcome": "failed", "error": "no such thing " * 9 + "\nsecond line"}
    measured = {
        "outcome": "interrupted",
        "first_reward": -0.25,
        "last_reward": -10.5,
        "evaluation": {"eval/held_out/pass@1": 0.5},
    }
    jobs = [
        SweptJob("0", long, measured),
        SweptJob("1", {**long, "train.seed": "2", "optimizer.lr": "1e-5"}, refused),
        SweptJob("2", {**long, "env.system_prompt": long["env.system_prompt"] * 2}, refused),
        SweptJob("3", {"train.seed": "1"}, {}),
    ]
    told = table(tmp_path, jobs).splitlines()
    assert all(len(line) <= WIDTH for line in told if str(tmp_path) not in line)
    assert sum(line.startswith("failed 1, 2: no such thing") for line in told) == 1
    assert any(line.split()[0] == "3" and line.endswith("cut off") for line in told[2:])
    assert any("-0.250 -> -10.500" in line and line.endswith(" 0.500") for line in told)
    alike = [SweptJob(name, {"train.seed": name, "policy": "dapo"}, measured) for name in "01"]
    assert "policy" not in table(tmp_path, alike)
