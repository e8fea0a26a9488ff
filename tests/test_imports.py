"""What a command imports: packages that cost tenths of a second, and whose time nobody waits for without a need."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ENVIRONMENT, ROOT

HEAVY = {
    *(
        "accelerate",
        "bitsandbytes",
        "datasets",
        "numpy",
        "peft",
        "pyarrow",
        "ray",
        "scipy",
        "sympy",
        "tensordict",
    ),
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
from torchgrpo.run.lockstep import Lockstep

def train(run):
    run.push_weights()
    print("groups", len(run.collect()))
    print("imported", *sys.modules)
    sys.exit(0)

launch(train, Lockstep)
"""


def imported(code: str, *words: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """The packages that a new interpreter has imported by the time that `code` says so."""
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("imported ")]
    return {name.partition(".")[0] for name in line.split()[1:]}, ended


@pytest.mark.parametrize("script", ["grpo.py", pytest.param("grpo_async.py", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("train.learning_rate=1",), 2),
        (("--config-name", "grpo_quickstart", "run=plan"), 0),
    ],
    ids=["help", "wrong key", "plan"],
)
def test_what_starts_nothing_imports_nothing_heavy(
    script: str, words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    folder = [] if "--help" in words else [f"hydra.run.dir={tmp_path / 'run'}"]
    packages, ended = imported(SCRIPT, script, *words, *folder)
    assert ended.returncode == code, ended.stderr
    assert not packages & HEAVY
    assert "hydra" in packages


@pytest.mark.long
def test_the_first_groups_of_the_quickstart_wait_for_no_package_that_they_do_not_use(tmp_path: Path) -> None:
    """Adapters, 4 bits, vLLM, trackers: the quickstart uses none before it learns. TorchRL's environments bring Ray."""
    packages, ended = imported(
        UNTIL_THE_FIRST_GROUPS, "--config-name", "grpo_quickstart", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert ended.returncode == 0 and "groups 32" in ended.stdout, ended.stderr
    unused = {"bitsandbytes", "datasets", "peft", "vllm", "wandb"}
    assert not packages & unused
    assert {"torch", "transformers"} <= packages


def test_a_checkpoint_that_is_read_waits_for_no_library_of_models() -> None:
    """`run=export` copies a model that is there."""
    packages, ended = imported(
        "import sys, torchgrpo.run.jobs.export, torchgrpo.training.checkpoint; print('imported', *sys.modules)"
    )
    assert ended.returncode == 0, ended.stderr
    assert not packages & {"accelerate", "peft", "scipy", "torchrl", "transformers"}
    assert "torch" in packages
