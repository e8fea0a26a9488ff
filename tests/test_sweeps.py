"""Tests sweeps from the command line: launchers, Optuna, failing jobs, Ctrl-C."""

import csv
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from config.cli.composition import CONFIG_DIR, register_schema
from config.cli.error_messages import is_user_error, user_message
from config.cli.sweep_jobs import LAST_STEPS, objective
from tests.processes import process_tree, wait_for_exit
from tests.script_runner import (
    ENVIRONMENT,
    QUICK,
    ROOT,
    read_metrics,
    run_python,
    start_python,
    wait_for_output,
    wait_until,
)
from torchgrpo.run import sweep

pytestmark = pytest.mark.long
SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32", "optimizer.warmup_steps=0")
LONG = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=1600000", "train.checkpoint_frequency=0")
TOO_LONG = "inference_model.max_tokens=8,1000000,9"
"""The second job is refused, since its completions do not fit into the model."""
LAUNCHERS = {
    "basic": "hydra",
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "ray": "hydra_plugins.hydra_ray_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
}


def start_sweep(folder: Path, *overrides: str, cwd: Path) -> subprocess.Popen[str]:
    """Starts a sweep outside of the checkout.

    Jobs of joblib and submitit start in new interpreters.
    """
    command = [str(ROOT / "grpo.py"), "--config-name", "grpo_quickstart", "--multirun"]
    return start_python([*command, f"hydra.sweep.dir={folder}", *QUICK, *overrides], cwd, stderr=subprocess.STDOUT)


def outcomes(folder: Path) -> dict[str, str]:
    paths = folder.glob("*/summary.json")
    return {path.parent.name: json.loads(path.read_text())["outcome"] for path in paths}


def non_loopback_listeners(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yields non-loopback addresses on which a process or its descendants listen."""
    for one in process_tree(process.pid):
        with suppress(psutil.NoSuchProcess):
            for connection in one.net_connections("inet"):
                address = connection.laddr
                is_loopback = "127.0.0.1" in address.ip or address.ip == "::1"
                if connection.status == psutil.CONN_LISTEN and not is_loopback:
                    yield f"{one.name()} on {address}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failed_job_does_not_stop_other_jobs(launcher: str, tmp_path: Path) -> None:
    """A failed job stops no other; nothing listens beyond loopback."""
    pytest.importorskip(LAUNCHERS[launcher])
    folder = tmp_path / "sweep"
    jobs = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    process = start_sweep(folder, f"hydra/launcher={launcher}", *jobs, *SMALL, TOO_LONG, cwd=tmp_path)
    foreign: set[str] = set()
    while process.poll() is None and not (folder / "summary.csv").exists():
        foreign |= set(non_loopback_listeners(process))
        time.sleep(0.3)
    output = wait_for_output(process)
    assert not foreign
    assert process.returncode == 1, output
    assert outcomes(folder) == {"0": "finished", "1": "failed", "2": "finished"}
    assert all(len(read_metrics(folder / job)) == 2 for job in ("0", "2"))
    assert not (folder / "1" / "metrics.jsonl").exists()
    assert "Traceback" not in output
    assert re.search(rf"error: {folder / '1'} failed: model\.name=\S+ has \d+ positions, but prompt plus", output)
    with (folder / "summary.csv").open() as file:
        sweep_rows = list(csv.DictReader(file))
    assert [row["inference_model.max_tokens"] for row in sweep_rows] == ["8", "1000000", "9"]
    assert float(sweep_rows[2]["last_reward"]) == read_metrics(folder / "2")[-1]["reward/mean"]


def test_a_study_goes_on_after_failed_trials(tmp_path: Path) -> None:
    """Failed trials do not end a study; the objective is maximised."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    study = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1")
    searched = ("optimizer.lr=tag(log,interval(1e-5,1e-3))", "inference_model.max_tokens=choice(8,1000000)")
    process = start_sweep(tmp_path, *study, "hydra.sweeper.n_jobs=1", *searched, *SMALL, cwd=tmp_path)
    output = wait_for_output(process)
    assert process.returncode == 1, output
    ran = outcomes(tmp_path)
    assert sorted(ran) == ["0", "1", "2", "3"]
    assert set(ran.values()) == {"finished", "failed"}
    results = OmegaConf.load(tmp_path / "optimization_results.yaml")
    objectives = [objective(tmp_path / job, None) for job, outcome in ran.items() if outcome == "finished"]
    assert results.best_value == max(value for value in objectives if value is not None)
    assert results.best_params["inference_model.max_tokens"] == 8


OWN_SCRIPT = """
from config.cli.command_line import command_line
from config.schema.errors import ConfigError
from torchgrpo.run.sweep import write_sweep_report

def job(config, run_dir, on_start):
    if config.train.seed == 0:
        raise ZeroDivisionError("by 0")
    if (run_dir / "metrics.jsonl").exists():
        raise ConfigError("there is an earlier run")
    on_start()
    (run_dir / "metrics.jsonl").touch()
    (run_dir / "summary.json").write_text('{"outcome": "finished"}')
    return "finished"

with write_sweep_report():
    command_line(job)
"""


def run_own_sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs a sweep with the script OWN_SCRIPT, in folder/sweep."""
    (folder / "own.py").write_text(OWN_SCRIPT)
    command = [str(folder / "own.py"), "--config-name", "grpo_quickstart", "--multirun", *overrides]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return run_python([*command, f"hydra.sweep.dir={folder / 'sweep'}"], environment=environment)


def test_a_fault_in_a_job_is_printed_and_an_earlier_run_is_unchanged(tmp_path: Path) -> None:
    """An unexpected error prints its traceback, and the next job starts."""
    folder = tmp_path / "sweep"
    first = run_own_sweep(tmp_path, "train.seed=0,1")
    assert first.returncode == 1, first.stderr
    assert outcomes(folder) == {"0": "failed", "1": "finished"}
    assert "in job\n" in first.stderr and "ZeroDivisionError: by 0" in first.stderr

    def run_files() -> dict[Path, str]:
        """Returns the files of the finished run, without the log, which has the error."""
        files = [path for path in (folder / "1").rglob("*") if path.is_file() and path.name != "grpo.log"]
        return {path: path.read_text() for path in files}

    before = run_files()
    again = run_own_sweep(tmp_path, "train.seed=10,11")
    assert again.returncode == 1, again.stderr
    assert f"error: {folder / '1'} failed: there is an earlier run" in again.stderr
    assert run_files() == before and len(before) == 5


def test_a_study_whose_trials_all_fail_prints_one_message(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    study = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "train.seed=0")
    result = run_own_sweep(tmp_path, *study, "optimizer.lr=interval(1e-5,1e-3)")
    assert result.returncode == 1, result.stderr
    assert "error: every trial of the study failed" in result.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hydra.sweeper.direction=up", "direction=up: a run has one objective; set maximize or minimize"),
        ("hydra.sweeper.n_jobs=0", "hydra.sweeper.n_jobs=0: must be at least 1"),
        ("hydra.sweeper.storage=sqlite:///study.db", "pip install 'sqlalchemy<2'"),
    ],
)
def test_a_study_that_makes_no_sense_is_one_message(
    override: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    monkeypatch.setattr(sweep, "version", lambda package: "2.0")
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        overrides = ["hydra/sweeper=optuna", override]
        composed = compose("grpo_quickstart", overrides, return_hydra_config=True)
    with pytest.raises(SystemExit) as refused:
        sweep._prepare_optuna(composed.hydra)
    assert refused.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=interval(1e-3,1e-5)", "equal to the `high` value (low=0.001, high=1e-05)"),
        ("optimizer.lr=tag(log,interval(0,1))", "interval(low, high) of the sweep: The `low` value must be"),
    ],
)
def test_an_interval_that_makes_no_sense_is_one_message(override: str, expected: str) -> None:
    plugin = pytest.importorskip("hydra_plugins.hydra_optuna_sweeper._impl")
    with pytest.raises(ValueError, match="`low` value") as refused:
        plugin.create_params_from_overrides([override])
    assert is_user_error(refused.value) and expected in user_message(refused.value)


def test_an_interrupt_ends_the_jobs_in_other_processes(tmp_path: Path) -> None:
    """Ctrl-C ends the processes of running jobs; the third job never starts."""
    pytest.importorskip(LAUNCHERS["joblib"])
    folder, overrides = tmp_path / "sweep", ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    process = start_sweep(folder, *overrides, *LONG, "train.seed=0,1,2", cwd=tmp_path)
    wait_until(lambda: len(list(folder.glob("*/metrics.jsonl"))) == 2, process)
    _, *children = process_tree(process.pid)
    process.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 130, output
    assert "error: interrupted" in output and "Traceback" not in output
    assert len(list(folder.glob("*/metrics.jsonl"))) == 2
    for one in children:
        wait_for_exit(one.pid)


def test_the_objective(tmp_path: Path) -> None:
    """The objective is the first set's last pass@1, else the last steps' mean reward.

    None where there is no number.
    """
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
