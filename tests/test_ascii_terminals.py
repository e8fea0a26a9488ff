"""Commands where a terminal, or the whole system, takes ASCII alone."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from config.cli.command_line import escape_what_a_terminal_lacks
from tests.reports.made_run import Made, make_run
from tests.scripts import ENVIRONMENT, ROOT

pytestmark = pytest.mark.long

TERMINAL = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
SYSTEM = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def said(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Of the script in a new interpreter, whose encodings it has from the start."""
    command = [sys.executable, "grpo.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With emoji and Hebrew in its completions, and Chinese in its settings."""
    made = Made(steps=4, evaluate=2, hostile=True)
    return make_run(tmp_path_factory.mktemp("made") / "run", made, ("env.system_prompt='算'",))


@pytest.mark.parametrize(
    ("job", "environment"),
    [("rollouts", TERMINAL), ("rollouts", SYSTEM), ("doctor", SYSTEM), ("report", SYSTEM)],
    ids=["rollouts, terminal", "rollouts", "doctor", "report"],
)
def test_what_a_run_left_is_shown(job: str, environment: Mapping[str, str], run: Path) -> None:
    shown = said(environment, f"run={job}", f"run_dir={run}")
    assert shown.returncode == 0, shown.stderr
    assert job != "rollouts" or "\\U0001f600" in shown.stdout


def test_what_hydra_prints(tmp_path: Path) -> None:
    shown = said(TERMINAL, "--cfg", "job", "env.system_prompt='算'", f"hydra.run.dir={tmp_path}")
    assert shown.returncode == 0, shown.stderr
    assert "\\u7b97" in shown.stdout


def test_a_plan_of_a_model_with_other_letters(tmp_path: Path) -> None:
    for file in (ROOT / "torchgrpo" / "models" / "quickstart").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "config.json"
    told = config.read_text(encoding="utf-8")
    config.unlink()
    config.write_text(told.replace("{", '{"note": "模型",', 1), encoding="utf-8")
    shown = said(SYSTEM, "--config-name", "grpo_quickstart", "run=plan", f"model.name={tmp_path}")
    assert shown.returncode == 0, shown.stderr


REWARD = """
def reward(completion, example):
    print("计算")
    return 1.0
"""


def test_a_reward_that_prints_is_no_error(tmp_path: Path) -> None:
    """It does so in a process of its own."""
    (tmp_path / "printing.py").write_text(REWARD, encoding="utf-8")
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"row": 0, "completion": "1"}\n', encoding="utf-8")
    environment = {**TERMINAL, "PYTHONPATH": str(tmp_path)}
    rewarded = ("env.dataset=arithmetic", "env.reward=printing:reward", f"env.samples={samples}")
    judged = said(environment, "run=rewards", *rewarded)
    assert judged.returncode == 0, judged.stderr
    assert "\\u8ba1\\u7b97" in judged.stderr


def test_streams_that_are_no_files_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", None)  # closed
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1:strict")
    escape_what_a_terminal_lacks()
    assert (terminal.encoding, terminal.errors) == ("ascii", "backslashreplace")
    assert os.environ["PYTHONIOENCODING"] == "latin-1:backslashreplace"
