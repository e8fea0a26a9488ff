"""Commands on a terminal or system whose encoding is ASCII."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from config.cli.command_line import escape_unencodable_characters
from tests.reports.synthetic_run import RunSpec, write_run_folder
from tests.script_runner import ENVIRONMENT, ROOT

pytestmark = pytest.mark.long

ASCII_TERMINAL = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
ASCII_SYSTEM = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def run_grpo(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Runs grpo.py in a new interpreter, which reads the encodings at its start."""
    command = [sys.executable, "grpo.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a run with emoji and Hebrew in completions and Chinese in settings."""
    spec = RunSpec(steps=4, evaluate=2, hostile=True)
    return write_run_folder(tmp_path_factory.mktemp("runs") / "run", spec, ("env.system_prompt='算'",))


@pytest.mark.parametrize(
    ("job", "environment"),
    [("rollouts", ASCII_TERMINAL), ("rollouts", ASCII_SYSTEM), ("diagnostics", ASCII_SYSTEM), ("report", ASCII_SYSTEM)],
    ids=["rollouts, terminal", "rollouts", "diagnostics", "report"],
)
def test_jobs_print_the_files_of_a_run(job: str, environment: Mapping[str, str], run: Path) -> None:
    process = run_grpo(environment, f"run={job}", f"run_dir={run}")
    assert process.returncode == 0, process.stderr
    assert job != "rollouts" or "\\U0001f600" in process.stdout


def test_output_of_hydra_is_escaped(tmp_path: Path) -> None:
    process = run_grpo(ASCII_TERMINAL, "--cfg", "job", "env.system_prompt='算'", f"hydra.run.dir={tmp_path}")
    assert process.returncode == 0, process.stderr
    assert "\\u7b97" in process.stdout


def test_a_plan_reads_a_model_config_with_chinese_text(tmp_path: Path) -> None:
    for file in (ROOT / "torchgrpo" / "models" / "quickstart").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "config.json"
    config_text = config.read_text(encoding="utf-8")
    config.unlink()
    config.write_text(config_text.replace("{", '{"note": "模型",', 1), encoding="utf-8")
    process = run_grpo(ASCII_SYSTEM, "--config-name", "grpo_quickstart", "run=plan", f"model.name={tmp_path}")
    assert process.returncode == 0, process.stderr


REWARD = """
def reward(completion, example):
    print("计算")
    return 1.0
"""


def test_a_reward_that_prints_is_no_error(tmp_path: Path) -> None:
    """The reward prints in a worker process."""
    (tmp_path / "printing.py").write_text(REWARD, encoding="utf-8")
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"row": 0, "completion": "1"}\n', encoding="utf-8")
    environment = {**ASCII_TERMINAL, "PYTHONPATH": str(tmp_path)}
    options = ("env.dataset=arithmetic", "env.reward=printing:reward", f"rewards.completions={samples}")
    process = run_grpo(environment, "run=rewards", *options)
    assert process.returncode == 0, process.stderr
    assert "\\u8ba1\\u7b97" in process.stderr


def test_a_closed_stream_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", None)  # closed
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1:strict")
    escape_unencodable_characters()
    assert (terminal.encoding, terminal.errors) == ("ascii", "backslashreplace")
    assert os.environ["PYTHONIOENCODING"] == "latin-1:backslashreplace"
