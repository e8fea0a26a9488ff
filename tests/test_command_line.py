"""Tests of the command line: error messages, help, signals, and output."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.cli.command_line import INTERRUPT_LOSS_MESSAGE, INTERRUPT_MESSAGE
from tests.config.test_schema import make_config
from tests.script_runner import (
    ENVIRONMENT,
    ROOT,
    ScriptResult,
    call_script,
    read_metrics,
    run_python,
    run_script,
    start_script,
    wait_for_output,
    wait_until,
)
from torchgrpo.run.stop_signals import ECHO_S

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
ENDLESS = (*SMALL[:2], "train.total_dialog_turns=1600000", "train.checkpoint_frequency=0")


def run_grpo(*arguments: str) -> ScriptResult:
    return call_script("grpo.py", *arguments)


def has_one_error_message(result: ScriptResult) -> bool:
    return result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr + result.stdout


# --- configs ------------------------------------------------------------------------------------------------


def test_a_user_config_works_and_its_keys_are_checked(tmp_path: Path) -> None:
    text = "env: {dataset: arithmetic}\nmodel: {name: models/quickstart}\ndevice: cpu\n"
    text += "inference_model: {max_tokens: 8}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: [base, _self_]\n{text}")
    (tmp_path / "alone.yaml").write_text(text)
    (tmp_path / "open.yaml").write_text(f"defaults: [base, _self_]\n{text}train: {{epochs: 2\n")
    (tmp_path / "wrong.yaml").write_text(f"defaults: [base, _self_]\n{text}trian: {{epochs: 2}}\n")
    options = ("--config-dir", str(tmp_path), "run=plan", f"hydra.run.dir={tmp_path / 'run'}", "--config-name")
    assert run_grpo(*options, "mine").returncode == 0
    for name, expected in (
        ("alone", "not built on base; begin its file with\n  defaults: [base, _self_]"),
        ("open", "open.yaml, line 7: invalid YAML (expected ',' or '}'"),
        ("wrong", "trian: no such configuration key; did you mean"),
        ("miner", "no such config; did you mean mine? Choose one of alone, grpo_code"),
    ):
        result = run_grpo(*options, name)
        assert result.returncode == 2
        assert has_one_error_message(result), result.stderr
        assert expected in result.stderr


def test_an_unknown_key_behind_a_plus_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    result = run_grpo("--config-name", "grpo_quickstart", "+inference_model.min_pp=0.1", folder)
    assert result.returncode == 2
    assert has_one_error_message(result), result.stderr
    assert "inference_model.min_pp: no such configuration key" in result.stderr
    assert not (tmp_path / "run").exists()


def test_help_is_a_screen_that_names_every_config_and_option() -> None:
    result = run_grpo("--help")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) < 45
    assert [line for line in lines if line.startswith("python grpo.py [")] != []
    listed = re.findall(r"^  (grpo_\w+)  ", result.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "config").glob("grpo_*.yaml"))
    assert "docs/config.md" in result.stdout
    assert (ROOT / "docs" / "config.md").is_file()
    for group in ("policy", "optimizer"):
        options = ", ".join(sorted(path.stem for path in (ROOT / "config" / group).glob("*.yaml")))
        assert f"\n{group}: {options}\n" in result.stdout
    examples = [line for line in lines if re.match(r"  python grpo\.py ", line)]
    assert len(examples) >= 4
    for line in examples:
        words = shlex.split(line)[2:]
        name = words.pop(words.index("--config-name") + 1) if "--config-name" in words else "grpo_gsm8k"
        overrides = [word for word in words if not word.startswith("--")]
        if "--multirun" in words:
            overrides = [word.split(",")[0] for word in overrides]
        make_config(name, *overrides)


def test_hydra_flags_that_print_the_configuration_work() -> None:
    quick = ("--config-name", "grpo_quickstart")
    assert "lr: 0.0003" in run_grpo(*quick, "--cfg", "job", "-p", "optimizer").stdout
    assert "policy/grpo" in run_grpo(*quick, "--info", "defaults").stdout
    assert "complete" in run_grpo("--shell-completion", "install=bash").stdout


# --- errors of the system -------------------------------------------------------------------------------------


@pytest.mark.parametrize("obstacle", ["full disk", "log that cannot be opened", "file in the way", "no such place"])
def test_a_folder_that_cannot_be_written_is_one_message(obstacle: str, tmp_path: Path) -> None:
    """The log is opened before the job starts. Every write to /dev/full fails with ENOSPC."""
    run_dir = tmp_path / "run"
    if obstacle == "full disk":
        (run_dir / ".hydra").mkdir(parents=True)
        (run_dir / ".hydra" / "config.yaml").symlink_to("/dev/full")
    elif obstacle == "log that cannot be opened":
        (run_dir / "grpo.log").mkdir(parents=True)
    elif obstacle == "file in the way":
        (tmp_path / "file").touch()
        run_dir = tmp_path / "file" / "run"
    else:
        run_dir = Path("/proc/no/such/place")
    result = run_grpo("--config-name", "grpo_quickstart", f"hydra.run.dir={run_dir}")
    assert result.returncode == 2
    assert has_one_error_message(result), result.stderr
    disk_full = "no space is left to write", "or set hydra.run.dir to another folder"
    expected = (
        disk_full
        if obstacle == "full disk"
        else ("hydra.run.dir: the run's folder cannot be written (", "set hydra.run.dir=FOLDER")
    )
    assert all(phrase in result.stderr for phrase in expected)


def test_a_log_on_a_full_disk_does_not_hide_the_message(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()  # of an earlier run, whose log also gets the error
    (tmp_path / "grpo.log").symlink_to("/dev/full")
    result = run_grpo("--config-name", "grpo_quickstart", "env.repeats=1", f"hydra.run.dir={tmp_path}")
    assert result.returncode == 2
    assert has_one_error_message(result), result.stderr


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (ROOT / "torchgrpo" / "models" / "quickstart").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.down_proj.weight"))
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    run_dir = tmp_path / "run"
    result = run_grpo("--config-name", "grpo_quickstart", f"model.name={folder}", f"hydra.run.dir={run_dir}")
    assert result.returncode == 2
    assert has_one_error_message(result), result.stderr
    assert f"{name} holds values that are not finite" in result.stderr
    assert "soft-capping" not in result.stderr
    assert not run_dir.exists()


def test_an_error_names_a_diverged_learner(tmp_path: Path) -> None:
    more = ("optimizer.lr=1e30", "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    process = run_script("grpo.py", tmp_path, *SMALL, *more)
    output = process.output
    assert process.returncode == 1, output
    assert output.count("error: ") == 1
    assert "the learner's own log-probs are not finite" in output
    assert "Traceback" not in output
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"
    assert "the learner's own log-probs are not finite" in (tmp_path / "grpo.log").read_text()


def test_a_package_that_does_not_load_is_one_message(tmp_path: Path) -> None:
    """transformers imports an installed torchvision, which fails if built for another torch."""
    broken = tmp_path / "packages" / "torchvision" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path / "packages")}
    process = start_script("grpo.py", tmp_path / "run", *SMALL, environment=environment)
    output = wait_for_output(process)
    assert process.returncode == 2, output
    assert "Traceback" not in output
    cause = f"operator torchvision::nms does not exist (RuntimeError in {broken}, line 1)"
    assert output.startswith(f"error: a package does not load: {cause}. Installed packages must match")
    assert not (tmp_path / "run").exists()


JOB = """
from config.cli.command_line import command_line

def job(config, run_dir, on_start):
    on_start()
    for _ in range(config.train.seed):
        print("a line of many", flush=True)
    (run_dir / "summary.json").write_text('{"outcome": "interrupted"}')
    return "interrupted"

command_line(job)
"""
"""Script of a job that prints `train.seed` lines."""


def test_a_closed_output_pipe_ends_the_run_silently(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = f"{tmp_path / 'job.py'} --config-name grpo_quickstart hydra.run.dir={tmp_path / 'run'} train.seed=100000"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {command} | head -n 1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (result.returncode, result.stdout, result.stderr) == (1, "a line of many\n", "")


# --- signals ------------------------------------------------------------------------------------------------


CLOCK_SCRIPT = f"""
import runpy, sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, {str(ROOT)!r})
from torchgrpo.run import stop_signals

HERE = Path(__file__).parent
handle = stop_signals.StopRequest._request_stop

def handle_and_note(self, number, frame):
    handle(self, number, frame)
    (HERE / "handled").touch()

stop_signals.time = SimpleNamespace(monotonic=lambda: float((HERE / "now").read_text()))
stop_signals.StopRequest._request_stop = handle_and_note
runpy.run_path("grpo.py", run_name="__main__")
"""
"""Script that runs grpo.py with signals at the time in the file `now`, and touches `handled` after a stop request."""


def start_clocked_script(folder: Path, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """Starts grpo.py as `CLOCK_SCRIPT` at time 0, with modules of `folder` on the import path."""
    script = folder / "clocked.py"
    script.write_text(CLOCK_SCRIPT)
    (folder / "now").write_text("0")
    return start_script(str(script), run_dir, *overrides, environment={**ENVIRONMENT, "PYTHONPATH": str(folder)})


def test_an_echo_of_ctrl_c_is_not_a_second_one(tmp_path: Path) -> None:
    """Launchers such as make pass on a signal that the terminal sent to all processes."""
    process = start_clocked_script(tmp_path, tmp_path, *ENDLESS)
    wait_until(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.01)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert output.count("finishing this iteration") == 1
    assert "Traceback" not in output
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


SLOW_REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def reward(completion, example):
    if (HERE / "slow").exists():
        (HERE / "started").touch()
        time.sleep(4)
    return float(len(completion.text) % 2)
"""


def test_a_deliberate_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    """The run ends in the middle of an iteration with slow rewards.

    The echo of the second Ctrl-C changes nothing.
    """
    run_dir = tmp_path / "run"
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    settings = ("env.reward=slow_reward:reward", "env.reward_workers=1")
    process = start_clocked_script(tmp_path, run_dir, *ENDLESS, *settings)
    wait_until(lambda: (run_dir / "metrics.jsonl").exists(), process)
    (tmp_path / "slow").touch()
    wait_until(lambda: (tmp_path / "started").exists(), process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "handled").exists(), process)
    (tmp_path / "now").write_text(str(ECHO_S))  # from now on a signal is no echo of the first
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output = wait_for_output(process)
    assert process.returncode == 130, output
    assert output.count("finishing this iteration") == 1
    assert "Traceback" not in output
    assert output.splitlines()[-1] == f"error: {INTERRUPT_LOSS_MESSAGE}"
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "interrupted"
    assert not (run_dir / "checkpoints").exists()


SLOW_IMPORT = """
import time
from pathlib import Path

from envs.task import Example, Task, register

(Path(__file__).parent / "started").touch()
time.sleep(120)
"""


def test_ctrl_c_before_the_start_leaves_no_folder(tmp_path: Path) -> None:
    """Ctrl-C arrives while the module of the reward is imported."""
    run_dir = tmp_path / "run"
    (tmp_path / "slow_module.py").write_text(SLOW_IMPORT)
    more = ("env.reward=slow_module:reward", "env.reward_workers=1")
    process = start_clocked_script(tmp_path, run_dir, *SMALL, *more)
    wait_until(lambda: (tmp_path / "started").exists(), process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    output = wait_for_output(process)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert output.splitlines()[-1] == f"error: {INTERRUPT_MESSAGE}"
    assert not run_dir.exists()


@pytest.mark.long
def test_the_printed_resume_command_continues_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    process = start_script("grpo.py", run_dir, *ENDLESS, "env.system_prompt='Be brief, please: x=1'")
    wait_until(lambda: (run_dir / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    num_steps = read_metrics(run_dir)[-1]["optimizer_step"]
    commands = [line for line in output.splitlines() if line.startswith("  python grpo.py ")]
    (line,) = [line for line in commands if "train.resume" in line]
    words = shlex.split(line)
    assert words[-1] == "train.resume=auto"
    total = f"train.total_dialog_turns={16 * (int(num_steps) + 2)}"
    resumed = run_python([*words[1:], total])
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {run_dir}" in resumed.stderr
    assert [row["optimizer_step"] for row in read_metrics(run_dir)] == list(range(1, int(num_steps) + 3))
