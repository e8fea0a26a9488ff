"""The package that `pip install .` makes: commands that run from any folder, with configs and the quickstart model."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.scripts import QUICK, ROOT, rows

pytestmark = pytest.mark.long

NOT_IN_A_CLONE = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "outputs", "multirun", "tests"
)


def said(command: Sequence[object], cwd: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Output of a command, stderr included; it must end well."""
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content and its commands; nothing is downloaded."""
    made = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT, made / "source", ignore=NOT_IN_A_CLONE)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    said([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, made / "source"], made)
    (wheel,) = made.glob("*.whl")
    said([*pip, "install", "--no-deps", "--no-index", "--target", made / "site", wheel], made)
    return made / "site"


def elsewhere(installed: Path) -> dict[str, str]:
    """An environment in which Python finds the installed package, and not this repository."""
    return {**os.environ, "PYTHONPATH": str(installed)}


def test_nothing_is_read_from_the_repository(installed: Path, tmp_path: Path) -> None:
    rooms = ["config", "envs", "torchgrpo"]
    added = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert added == {"bin", "grpo.py", "grpo_async.py", "grpo_utils.py", "__pycache__", *rooms}
    script = f"import grpo, grpo_async, {', '.join(rooms)}\nfor room in {rooms}: print(eval(room).__file__)"
    found = said([sys.executable, "-c", script], tmp_path, elsewhere(installed)).split()
    assert found == [str(installed / room / "__init__.py") for room in rooms]


@pytest.mark.parametrize("command", ["grpo", "grpo-async"])
def test_the_commands_know_the_configs_that_ship(installed: Path, command: str, tmp_path: Path) -> None:
    told = said([installed / "bin" / command, "--help"], tmp_path, elsewhere(installed))
    assert "dr_grpo" in told
    assert "muon_adamw" in told
    composed = said(
        [installed / "bin" / command, "--cfg", "job", "-p", "model"], tmp_path, elsewhere(installed)
    )
    assert "Qwen/Qwen2.5-3B-Instruct" in composed


def test_an_installed_quickstart_trains_in_another_folder(installed: Path, tmp_path: Path) -> None:
    short = ["train.total_dialog_turns=32", "env.num_envs=4", "env.repeats=4", "hydra.run.dir=here", *QUICK]
    told = said(
        [installed / "bin" / "grpo", "--config-name", "grpo_quickstart", *short],
        tmp_path,
        elsewhere(installed),
    )
    assert "finished: 2 optimizer steps" in told
    assert len(rows(tmp_path / "here")) == 2
    assert (tmp_path / "here" / "report.html").is_file()


def test_beside_a_project_with_the_same_names_both_work(installed: Path, tmp_path: Path) -> None:
    """config.py, run.py, training.py, plan/ and models/ of a user's, and a reward in one of them."""
    for name in ("config.py", "run.py", "training.py"):
        (tmp_path / name).write_text(
            f"MINE = {name!r}\ndef reward(completion, example):\n    return 0.25 + len(completion.text) % 2\n"
        )
    for name in ("plan", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = {name!r}\n")
    theirs = said(
        [
            sys.executable,
            "-c",
            "import config, run, plan, models; print(config.MINE, run.MINE, plan.MINE, models.MINE)",
        ],
        tmp_path,
        elsewhere(installed),
    )
    assert theirs.split() == ["config.py", "run.py", "plan", "models"]
    short = ["train.total_dialog_turns=16", "env.num_envs=2", "env.repeats=4", *QUICK]
    command = [installed / "bin" / "grpo", "--config-name", "grpo_quickstart", *short]
    told = said(
        [*command, "env.reward=training:reward", "hydra.run.dir=here"], tmp_path, elsewhere(installed)
    )
    assert "finished: 2 optimizer steps" in told
    assert all(0.25 <= row["reward/mean"] <= 1.25 for row in rows(tmp_path / "here"))
    refused = subprocess.run(
        [str(word) for word in [*command, "env.reward=config:reward", "hydra.run.dir=other"]],
        cwd=tmp_path,
        env=elsewhere(installed),
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert f"{tmp_path / 'config.py'} is hidden by 'config'" in refused.stderr
    assert "give your file another name" in refused.stderr
