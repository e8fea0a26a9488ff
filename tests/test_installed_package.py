"""The installed package: its commands, shipped configs and quickstart model work in any folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.script_runner import QUICK, ROOT, read_metrics

pytestmark = pytest.mark.long

NOT_IN_A_CLONE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "outputs", "multirun", "tests")


def run_command(command: Sequence[object], cwd: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Returns stdout and stderr of a command, which must exit with 0."""
    process = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.fixture(scope="module")
def installed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the content and the commands of the wheel; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_IN_A_CLONE)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run_command([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"], folder)
    (wheel,) = folder.glob("*.whl")
    run_command([*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", wheel], folder)
    return folder / "site"


def package_environment(installed_package: Path) -> dict[str, str]:
    """Returns environment variables with which Python finds the installed package instead of this repository."""
    return {**os.environ, "PYTHONPATH": str(installed_package)}


def test_modules_come_from_the_installed_package(installed_package: Path, tmp_path: Path) -> None:
    packages = ["config", "envs", "torchgrpo"]
    added = {path.name for path in installed_package.iterdir() if path.suffix != ".dist-info"}
    assert added == {"bin", "grpo.py", "grpo_async.py", "grpo_utils.py", "__pycache__", *packages}
    script = f"import grpo, grpo_async, {', '.join(packages)}\nfor name in {packages}: print(eval(name).__file__)"
    package_files = run_command(
        [sys.executable, "-c", script], tmp_path, package_environment(installed_package)
    ).split()
    assert package_files == [str(installed_package / package / "__init__.py") for package in packages]


@pytest.mark.parametrize("command", ["grpo", "grpo-async"])
def test_the_commands_find_the_shipped_configs(installed_package: Path, command: str, tmp_path: Path) -> None:
    output = run_command(
        [installed_package / "bin" / command, "--help"], tmp_path, package_environment(installed_package)
    )
    assert "dr_grpo" in output
    assert "muon_adamw" in output
    composed_config = run_command(
        [installed_package / "bin" / command, "--cfg", "job", "-p", "model"],
        tmp_path,
        package_environment(installed_package),
    )
    assert "Qwen/Qwen2.5-3B-Instruct" in composed_config


def test_an_installed_quickstart_trains_in_another_folder(installed_package: Path, tmp_path: Path) -> None:
    short = ["train.total_dialog_turns=32", "env.num_envs=4", "env.repeats=4", "hydra.run.dir=here", *QUICK]
    output = run_command(
        [installed_package / "bin" / "grpo", "--config-name", "grpo_quickstart", *short],
        tmp_path,
        package_environment(installed_package),
    )
    assert "finished: 2 optimizer steps" in output
    assert len(read_metrics(tmp_path / "here")) == 2
    assert (tmp_path / "here" / "report.html").is_file()


def test_a_user_project_with_the_same_module_names_works(installed_package: Path, tmp_path: Path) -> None:
    """The user's project has config.py, run.py, training.py, plan/ and models/.

    A reward in training.py works. A reward in config.py is refused, since the package has a module of that name.
    """
    for name in ("config.py", "run.py", "training.py"):
        (tmp_path / name).write_text(
            f"MINE = {name!r}\ndef reward(completion, example):\n    return 0.25 + len(completion.text) % 2\n"
        )
    for name in ("plan", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = {name!r}\n")
    user_modules = run_command(
        [
            sys.executable,
            "-c",
            "import config, run, plan, models; print(config.MINE, run.MINE, plan.MINE, models.MINE)",
        ],
        tmp_path,
        package_environment(installed_package),
    )
    assert user_modules.split() == ["config.py", "run.py", "plan", "models"]
    short = ["train.total_dialog_turns=16", "env.num_envs=2", "env.repeats=4", *QUICK]
    command = [installed_package / "bin" / "grpo", "--config-name", "grpo_quickstart", *short]
    output = run_command(
        [*command, "env.reward=training:reward", "hydra.run.dir=here"], tmp_path, package_environment(installed_package)
    )
    assert "finished: 2 optimizer steps" in output
    assert all(0.25 <= row["reward/mean"] <= 1.25 for row in read_metrics(tmp_path / "here"))
    process = subprocess.run(
        [str(word) for word in [*command, "env.reward=config:reward", "hydra.run.dir=other"]],
        cwd=tmp_path,
        env=package_environment(installed_package),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert f"{tmp_path / 'config.py'} is hidden by 'config'" in process.stderr
    assert "give your file another name" in process.stderr
