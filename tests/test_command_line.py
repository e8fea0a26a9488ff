"""The command line as a user meets it: what it says when something is wrong, how signals end it, what it prints."""

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

from config.cli.command_line import AT_ONCE, ENDED
from tests.config.test_schema import composed
from tests.scripts import ENVIRONMENT, ROOT, Ended, called, ended, finish, ran, rows, start, wait_for
from torchgrpo.run.signals import ECHO_S

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
ENDLESS = (*SMALL[:2], "train.total_dialog_turns=1600000", "train.checkpoint_frequency=0")


def said(*arguments: str) -> Ended:
    return called("grpo.py", *arguments)


def is_one_message(result: Ended) -> bool:
    return result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr + result.stdout


# --- configs ------------------------------------------------------------------------------------------------


def test_a_config_of_ones_own_works_and_its_keys_are_checked(tmp_path: Path) -> None:
    text = "env: {dataset: arithmetic}\nmodel: {name: models/quickstart}\ndevice: cpu\n"
    text += "inference_model: {max_tokens: 8}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: [base, _self_]\n{text}")
    (tmp_path / "alone.yaml").write_text(text)
    (tmp_path / "open.yaml").write_text(f"defaults: [base, _self_]\n{text}train: {{epochs: 2\n")
    (tmp_path / "wrong.yaml").write_text(f"defaults: [base, _self_]\n{text}trian: {{epochs: 2}}\n")
    own = ("--config-dir", str(tmp_path), "run=plan", f"hydra.run.dir={tmp_path / 'run'}", "--config-name")
    assert said(*own, "mine").returncode == 0
    for name, expected in (
        ("alone", "not built on base; its file begins with\n  defaults: [base, _self_]"),
        ("open", "open.yaml, line 7: this is no YAML (expected ',' or '}'"),
        ("wrong", "trian: no such configuration key; did you mean"),
        ("miner", "no such config; did you mean mine? There are: alone, grpo_code"),
    ):
        result = said(*own, name)
        assert result.returncode == 2
        assert is_one_message(result), result.stderr
        assert expected in result.stderr


def test_an_unknown_key_behind_a_plus_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    result = said("--config-name", "grpo_quickstart", "+inference_model.min_pp=0.1", folder)
    assert result.returncode == 2
    assert is_one_message(result), result.stderr
    assert "inference_model.min_pp: no such configuration key" in result.stderr
    assert not (tmp_path / "run").exists()


def test_help_is_a_screen_that_names_every_config_and_option() -> None:
    result = said("--help")
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
        composed(name, *overrides)


def test_what_prints_the_configuration_still_does() -> None:
    quick = ("--config-name", "grpo_quickstart")
    assert "lr: 0.0003" in said(*quick, "--cfg", "job", "-p", "optimizer").stdout
    assert "policy/grpo" in said(*quick, "--info", "defaults").stdout
    assert "complete" in said("--shell-completion", "install=bash").stdout


# --- what the system refuses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obstacle", ["full disk", "log that cannot be opened", "file in the way", "no such place"]
)
def test_a_folder_that_cannot_be_written_is_one_message(obstacle: str, tmp_path: Path) -> None:
    """The log is opened before the job begins. /dev/full: every write says that no space is left."""
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
    result = said("--config-name", "grpo_quickstart", f"hydra.run.dir={run_dir}")
    assert result.returncode == 2
    assert is_one_message(result), result.stderr
    full = "no space is left to write", "or write elsewhere with hydra.run.dir"
    expected = (
        full if obstacle == "full disk" else ("the run's folder cannot be written: ", "hydra.run.dir=FOLDER")
    )
    assert all(part in result.stderr for part in expected)


def test_a_log_on_a_full_disk_does_not_hide_the_message(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()  # of a run, whose log has the refusal too
    (tmp_path / "grpo.log").symlink_to("/dev/full")
    result = said("--config-name", "grpo_quickstart", "env.repeats=1", f"hydra.run.dir={tmp_path}")
    assert result.returncode == 2
    assert is_one_message(result), result.stderr


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
    result = said("--config-name", "grpo_quickstart", f"model.name={folder}", f"hydra.run.dir={run_dir}")
    assert result.returncode == 2
    assert is_one_message(result), result.stderr
    assert f"{name} holds values that are not finite" in result.stderr
    assert "soft-capping" not in result.stderr
    assert not run_dir.exists()


def test_a_learner_that_diverged_is_blamed_itself(tmp_path: Path) -> None:
    more = ("optimizer.lr=1e30", "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    process = ran("grpo.py", tmp_path, *SMALL, *more)
    output = process.output
    assert process.returncode == 1, output
    assert output.count("error: ") == 1
    assert "the learner's own log-probs are not finite" in output
    assert "Traceback" not in output
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"
    assert "the learner's own log-probs are not finite" in (tmp_path / "grpo.log").read_text()


def test_a_package_that_does_not_load_is_one_message(tmp_path: Path) -> None:
    """transformers import torchvision where they find it, and one that was built for another torch fails so."""
    broken = tmp_path / "packages" / "torchvision" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path / "packages")}
    process = start("grpo.py", tmp_path / "run", *SMALL, environment=environment)
    output = finish(process)
    assert process.returncode == 2, output
    assert "Traceback" not in output
    said = f"operator torchvision::nms does not exist (RuntimeError in {broken}, line 1)"
    assert output.startswith(f"error: a package does not load: {said}. What is installed together must fit")
    assert not (tmp_path / "run").exists()


JOB = """
from config.cli.command_line import command_line

def job(config, run_dir, begun):
    begun()
    for _ in range(config.train.seed):
        print("a line of many", flush=True)
    (run_dir / "summary.json").write_text('{"outcome": "interrupted"}')
    return "interrupted"

command_line(job)
"""
"""A run that prints as many lines as its seed says."""


def test_output_that_nobody_reads_to_its_end_ends_in_silence(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    own = f"{tmp_path / 'job.py'} --config-name grpo_quickstart hydra.run.dir={tmp_path / 'run'} train.seed=100000"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {own} | head -n 1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (result.returncode, result.stdout, result.stderr) == (1, "a line of many\n", "")


# --- signals ------------------------------------------------------------------------------------------------


def test_an_echo_of_ctrl_c_is_not_a_second_one(tmp_path: Path) -> None:
    """As `timeout --foreground`, make and launchers pass on what the terminal has brought to all."""
    process = start("grpo.py", tmp_path, *ENDLESS)
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.01)
    output = finish(process)
    assert process.returncode == 0, output
    assert output.count("finishing this iteration") == 1
    assert "Traceback" not in output
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


SLOW = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def reward(completion, example):
    if (HERE / "slow").exists():
        (HERE / "begun").touch()
        time.sleep(4)
    return float(len(completion.text) % 2)
"""


def test_a_deliberate_second_ctrl_c_ends_at_once_in_a_line(tmp_path: Path) -> None:
    """In an iteration whose 16 rewards take a minute; the echo of the second one does not disturb the end."""
    run_dir = tmp_path / "run"
    (tmp_path / "slow_reward.py").write_text(SLOW)
    own = ("env.reward=slow_reward:reward", "env.reward_workers=1")
    process = start(
        "grpo.py", run_dir, *ENDLESS, *own, environment={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    )
    wait_for(lambda: (run_dir / "metrics.jsonl").exists(), process)
    (tmp_path / "slow").touch()
    wait_for(lambda: (tmp_path / "begun").exists(), process)
    process.send_signal(signal.SIGINT)
    time.sleep(ECHO_S + 0.5)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 130, output
    assert output.count("finishing this iteration") == 1
    assert "Traceback" not in output
    assert output.splitlines()[-1] == f"error: {ENDED}"
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "interrupted"
    assert not (run_dir / "checkpoints").exists()


LOADING = """
import time
from pathlib import Path

from envs.task import Example, Task, register

(Path(__file__).parent / "begun").touch()
time.sleep(120)
"""


def test_ctrl_c_before_the_run_began_leaves_nothing(tmp_path: Path) -> None:
    """While it loads: a reward whose module takes minutes to import."""
    run_dir = tmp_path / "run"
    (tmp_path / "slow_module.py").write_text(LOADING)
    more = ("env.reward=slow_module:reward", "env.reward_workers=1")
    process = start(
        "grpo.py", run_dir, *SMALL, *more, environment={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    )
    wait_for(lambda: (tmp_path / "begun").exists(), process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    output = finish(process)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert output.splitlines()[-1] == f"error: {AT_ONCE}"
    assert not run_dir.exists()


@pytest.mark.long
def test_the_command_that_is_shown_goes_on_exactly(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    process = start("grpo.py", run_dir, *ENDLESS, "env.system_prompt='Be brief, please: x=1'")
    wait_for(lambda: (run_dir / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 0, output
    done = rows(run_dir)[-1]["optimizer_step"]
    shown = [line for line in output.splitlines() if line.startswith("  python grpo.py ")]
    (line,) = [line for line in shown if "train.resume" in line]
    words = shlex.split(line)
    assert words[-1] == "train.resume=auto"
    total = f"train.total_dialog_turns={16 * (int(done) + 2)}"
    again = ended([*words[1:], total])
    assert again.returncode == 0, again.stderr
    assert f"resumed from {run_dir}" in again.stderr
    assert [row["optimizer_step"] for row in rows(run_dir)] == list(range(1, int(done) + 3))
