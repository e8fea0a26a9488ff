"""Running the scripts as a user does, and in this process where a new one would only cost time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra import compose, initialize_config_dir

import grpo
import grpo_async
from config.composition import register_schema, to_config
from config.schema import Config
from run.lockstep import Lockstep
from run.overlapped import Overlapped

SCHEDULE_OF: dict[ModuleType, Any] = {grpo: Lockstep, grpo_async: Overlapped}
"""What each script's loop works with."""
ROOT = Path(__file__).resolve().parent.parent
QUICK = ("logging.progress=false", "logging.sample_frequency=0", "train_model.num_threads=1")


class StoppingAfterTheFirst(Lockstep):
    """A run that is asked to stop in its first iteration."""

    def done(self, iteration: int) -> None:
        self.run.stop.requested = True
        super().done(iteration)


def configured(*overrides: str, name: str = "grpo_quickstart") -> Config:
    register_schema()
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        return to_config(compose(name, overrides=[*QUICK, *overrides]))


def start(
    script: str,
    run_dir: Path,
    *overrides: str,
    name: str = "grpo_quickstart",
    enter: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> subprocess.Popen[str]:
    """The script in a process of its own, stdout and stderr joined; `enter`: the command that starts it."""
    command = [*enter, sys.executable, script, "--config-name", name, f"hydra.run.dir={run_dir}"]
    return subprocess.Popen(
        [*command, *QUICK, *overrides],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 600.0) -> str:
    """What it said, once it has ended; killed, and said as well, where the time is over first."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise AssertionError(f"after {timeout} s still running:\n{process.communicate()[0]}") from error


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_clocks(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows less what depends on how fast the machine was."""
    from monitoring import metrics as of_a_row

    return [of_a_row.without_clocks(row) for row in metrics]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 120.0) -> None:
    """Poll until the condition holds; fails when the process ends or the time is over first."""
    import time

    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"the script ended early:\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"after {timeout} s still waiting:\n{process.communicate()[0]}")
        time.sleep(0.05)
