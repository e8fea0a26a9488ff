"""Running the scripts as a user does, and in this process where a new one would only cost time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpo
import grpo_async
from config.composition import to_config
from config.schema import Config
from run.lockstep import Lockstep
from run.overlapped import Overlapped
from tests.composed import composed
from tests.forked import Forked, Server, at_load, can_fork
from tests.forked_ray import fork_processes_of_ray
from tests.keeper import FORKS
from tests.namespaces import Namespaces

SCHEDULE_OF: dict[ModuleType, Any] = {grpo: Lockstep, grpo_async: Overlapped}
"""What each script's loop works with."""
ROOT = Path(__file__).resolve().parent.parent
QUICK = ("logging.progress=false", "logging.sample_frequency=0", "train_model.num_threads=1")
ENVIRONMENT = dict(os.environ)
"""As the tests found it: engines in this process leave variables behind, some with another value each time."""
_OF_RUNS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_OF_SERVER = {**ENVIRONMENT, **_OF_RUNS}
"""Of the process that scripts are forked from."""


class StoppingAfterTheFirst(Lockstep):
    """A run that is asked to stop in its first iteration."""

    def done(self, iteration: int) -> None:
        self.run.stop.requested = True
        super().done(iteration)


def configured(*overrides: str, name: str = "grpo_quickstart") -> Config:
    return to_config(composed(name, *QUICK, *overrides))


Script = subprocess.Popen[str] | Forked


def start(
    script: str,
    run_dir: Path,
    *overrides: str,
    name: str = "grpo_quickstart",
    environment: Mapping[str, str] = ENVIRONMENT,
    within: Namespaces | None = None,
) -> Script:
    """The script in a process of its own, stdout and stderr joined; see `tests/forked.py` for what kind of one."""
    command = _command(script, run_dir, overrides, name)
    return begin(command, ROOT, {**environment, **_OF_RUNS}, subprocess.STDOUT, within)


def start_fresh(
    script: str,
    run_dir: Path,
    *overrides: str,
    enter: Sequence[str] = (),
    environment: Mapping[str, str] = ENVIRONMENT,
) -> subprocess.Popen[str]:
    """The same in a new interpreter, as a user starts it. Every script has a test of it for each way to end.

    enter: the command that starts the interpreter.
    """
    return subprocess.Popen(
        [*enter, sys.executable, *_command(script, run_dir, overrides, "grpo_quickstart")],
        cwd=ROOT,
        env={**environment, **_OF_RUNS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _command(script: str, run_dir: Path, overrides: Sequence[str], name: str) -> list[str]:
    return [script, "--config-name", name, f"hydra.run.dir={run_dir}", *QUICK, *overrides]


def begin(
    command: Sequence[str],
    cwd: Path = ROOT,
    environment: Mapping[str, str] = ENVIRONMENT,
    stderr: int = subprocess.PIPE,
    within: Namespaces | None = None,
) -> Script:
    """`python COMMAND`: forked from a process that has the imports, or a new one where that would not be the same."""
    if can_fork(environment) and at_load(environment) == at_load(_OF_SERVER):
        return Forked(command, cwd, environment, stderr, within)
    enter = [] if within is None else within.command(str(cwd))
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*enter, sys.executable, *command], cwd=cwd, env=environment, stdout=pipe, stderr=stderr, text=True
    )


def ended(
    command: Sequence[str], cwd: Path = ROOT, environment: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """What `python COMMAND` said on either stream, and its exit code."""
    process = begin(command, cwd, environment)
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def finish(process: Script, timeout: float = 600.0) -> str:
    """What it said, once it has ended; killed, and said as well, where the time is over first."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise AssertionError(f"after {timeout} s still running:\n{process.communicate()[0]}") from error


_workers_have_vllm = False


@contextmanager
def vllm_in_workers() -> Iterator[None]:
    """Workers of the Ray runtimes that are started here meanwhile are forked from a process that has vLLM."""
    global _workers_have_vllm
    _workers_have_vllm = True
    yield
    _workers_have_vllm = False


def fork_ray() -> None:
    """Of runtimes that tests start in this process from now on; those of forked scripts are by themselves."""

    if can_fork(ENVIRONMENT):
        fork_processes_of_ray(lambda: os.environ.update(forks()))


def forks() -> dict[str, str]:
    """The variable by which processes of Ray find what forks them; none where scripts are not forked."""
    if not can_fork(ENVIRONMENT):
        return {}
    return {FORKS: Server.of(_OF_SERVER).address(_workers_have_vllm)}


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_clocks(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows less what depends on how fast the machine was."""
    from monitoring import metrics as of_a_row

    return [of_a_row.without_clocks(row) for row in metrics]


def wait_for(condition: Callable[[], bool], process: Script, timeout: float = 120.0) -> None:
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
