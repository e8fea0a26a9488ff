"""Checks that commands import slow packages only when they use them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.script_runner import ENVIRONMENT, ROOT

SLOW_PACKAGES = {
    *("accelerate", "bitsandbytes", "datasets", "numpy", "peft", "pyarrow", "ray", "scipy", "sympy", "tensordict"),
    *("torch", "torchrl", "transformers", "vllm", "wandb"),
}
SCRIPT = """
import atexit, runpy, sys
atexit.register(lambda: print("imported", *sys.modules))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
UNTIL_THE_FIRST_GROUPS = """
import sys
from grpo_utils import launch
from torchgrpo.run.lockstep_run import LockstepRun

def train(run):
    run.push_weights()
    print("groups", len(run.collect()))
    print("imported", *sys.modules)
    sys.exit(0)

launch(train, LockstepRun)
"""


def packages_imported(code: str, *words: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """Runs code in a new interpreter; returns the packages that it imports, and the process.

    The code prints a line `imported MODULE ...`.
    """
    process = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("imported ")]
    return {name.partition(".")[0] for name in line.split()[1:]}, process


@pytest.mark.parametrize("script", ["grpo.py", pytest.param("grpo_async.py", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("words", "code"),
    [(("--help",), 0), (("train.learning_rate=1",), 2), (("--config-name", "grpo_quickstart", "run=plan"), 0)],
    ids=["help", "wrong key", "plan"],
)
def test_commands_without_a_run_import_no_slow_package(
    script: str, words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    folder = [] if "--help" in words else [f"hydra.run.dir={tmp_path / 'run'}"]
    packages, process = packages_imported(SCRIPT, script, *words, *folder)
    assert process.returncode == code, process.stderr
    assert not packages & SLOW_PACKAGES
    assert "hydra" in packages


@pytest.mark.long
def test_the_quickstart_imports_no_unused_package_before_its_first_groups(tmp_path: Path) -> None:
    """The quickstart samples without adapters, 4-bit weights, vLLM and trackers.

    Ray is imported by TorchRL's environments.
    """
    packages, process = packages_imported(
        UNTIL_THE_FIRST_GROUPS, "--config-name", "grpo_quickstart", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert process.returncode == 0 and "groups 32" in process.stdout, process.stderr
    unused_packages = {"bitsandbytes", "datasets", "peft", "vllm", "wandb"}
    assert not packages & unused_packages
    assert {"torch", "transformers"} <= packages


def test_an_export_imports_no_library_of_models() -> None:
    """`run=export` copies tensors and builds no model."""
    packages, process = packages_imported(
        "import sys, torchgrpo.run.jobs.export, torchgrpo.training.checkpoint; print('imported', *sys.modules)"
    )
    assert process.returncode == 0, process.stderr
    assert not packages & {"accelerate", "peft", "scipy", "torchrl", "transformers"}
    assert "torch" in packages
