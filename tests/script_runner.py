"""Runs grpo.py and grpo_async.py in this process or in a child process."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

from hydra.core.global_hydra import GlobalHydra

import grpo
import grpo_async
from config.cli.composition import to_config
from config.schema.config import Config
from tests.config_composition import compose_config
from torchgrpo.monitoring import metrics as metric_rows
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun
from torchgrpo.run.sweep import SweepStart
from torchgrpo.run.training_run import Callback, Run

SCRIPTS = {"grpo.py": grpo, "grpo_async.py": grpo_async}
SCHEDULE_CLASSES: dict[ModuleType, Any] = {grpo: LockstepRun, grpo_async: OverlappedRun}
"""The run class of each script."""
CallbackType = TypeVar("CallbackType", bound=Callback)
ROOT = Path(__file__).resolve().parent.parent
QUICK = ("logging.progress=false", "logging.sample_frequency=0", "train_model.num_threads=1")
ENVIRONMENT = dict(os.environ)
"""Environment at the start of the tests, since engines in this process set further variables."""
DEADLINE_S = 900.0
"""Time after which a script counts as hung."""
_RUN_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def compose_run_config(*overrides: str, name: str = "grpo_quickstart") -> Config:
    return to_config(compose_config(name, *QUICK, *overrides))


# --- in this process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptResult:
    """Exit code and output of a script.

    output: both streams, in the order of writing.
    """

    returncode: int
    stdout: str
    stderr: str
    output: str


class _Stream(io.StringIO):
    """A stream that also writes to `joint_output`."""

    def __init__(self, joint_output: io.StringIO) -> None:
        super().__init__()
        self._joint_output = joint_output

    def write(self, text: str) -> int:
        self._joint_output.write(text)
        return super().write(text)


def call_script(script: str, *arguments: str, modules: Path | None = None) -> ScriptResult:
    """Runs `python SCRIPT ARGUMENTS` in this process by a call of the script's `main`.

    modules: folder of the user's modules, first on the import path. The modules are unloaded afterwards.
    """
    joint_output = io.StringIO()
    stdout, stderr = _Stream(joint_output), _Stream(joint_output)
    code: Any = 0
    with ExitStack() as stack:
        stack.enter_context(_process_state())
        if modules is not None:
            stack.enter_context(_user_modules(modules))
        stack.enter_context(patch.object(sys, "argv", [script, *arguments]))
        stack.enter_context(redirect_stdout(stdout))
        stack.enter_context(redirect_stderr(stderr))
        try:
            SCRIPTS[script].main()
        except SystemExit as run_python:
            code = run_python.code or 0
    return ScriptResult(code, stdout.getvalue(), stderr.getvalue(), joint_output.getvalue())


def run_script(
    script: str, run_dir: Path, *overrides: str, name: str = "grpo_quickstart", modules: Path | None = None
) -> ScriptResult:
    """Starts a small run in this process; see `call_script`."""
    return call_script(script, *_arguments(run_dir, overrides, name), modules=modules)


@contextmanager
def _process_state() -> Iterator[None]:
    """Restores the environment, signal handlers, loggers and Hydra's state after a script."""
    variables, root = dict(os.environ), logging.getLogger()
    handlers, level, raises = list(root.handlers), root.level, logging.raiseExceptions
    own = logging.getLogger("grpo")
    own_handlers, own_level, propagates = list(own.handlers), own.level, own.propagate
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        SweepStart.folder = None
        for logger in (root, own):
            for handler in logger.handlers:
                if handler not in handlers and handler not in own_handlers:
                    with suppress(OSError):  # the error of a log on a full disk
                        handler.close()
        root.handlers, root.level, logging.raiseExceptions = handlers, level, raises
        own.handlers, own.level, own.propagate = own_handlers, own_level, propagates
        for number, handler_of in signals.items():
            signal.signal(number, handler_of)
        os.environ.clear()
        os.environ.update(variables)


@contextmanager
def _user_modules(folder: Path) -> Iterator[None]:
    """Puts `folder` on the import path, also of child processes, and unloads its modules afterwards."""
    outer = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), outer]))
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                del sys.modules[name]


# --- in an interpreter of its own -----------------------------------------------------------------------------


def start_script(
    script: str,
    run_dir: Path,
    *overrides: str,
    name: str = "grpo_quickstart",
    environment: Mapping[str, str] = ENVIRONMENT,
    enter: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Starts a script in a child process with stdout and stderr joined.

    enter: prefix of the command, such as one that enters other namespaces.
    """
    command = [script, *_arguments(run_dir, overrides, name)]
    return start_python(command, environment=environment, stderr=subprocess.STDOUT, enter=enter)


def start_python(
    command: Sequence[str],
    cwd: Path = ROOT,
    environment: Mapping[str, str] = ENVIRONMENT,
    stderr: int = subprocess.PIPE,
    enter: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Starts `python COMMAND` in a child process."""
    return subprocess.Popen(
        [*enter, sys.executable, *command],
        cwd=cwd,
        env={**_RUN_ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def run_python(
    command: Sequence[str], cwd: Path = ROOT, environment: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Runs `python COMMAND` and returns its exit code and both outputs."""
    process = start_python(command, cwd, environment)
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def wait_for_output(process: subprocess.Popen[str], timeout: float = DEADLINE_S) -> str:
    """Waits for a process and returns its output; kills it after `timeout`."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise AssertionError(f"after {timeout} s still running:\n{process.communicate()[0]}") from error


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = DEADLINE_S) -> None:
    """Polls until the condition holds; fails if the process ends or `timeout` passes first."""
    deadline = time.monotonic() + timeout
    while True:
        has_ended = process.poll() is not None  # asked first: the process may fulfil the condition and then end
        if condition():
            return
        if has_ended:
            raise AssertionError(f"the script ended early:\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"after {timeout} s still waiting:\n{process.communicate()[0]}")
        time.sleep(0.05)


def _arguments(run_dir: Path, overrides: Sequence[str], name: str) -> list[str]:
    return ["--config-name", name, f"hydra.run.dir={run_dir}", *QUICK, *overrides]


# --- files of a run --------------------------------------------------------------------------------------


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_timings(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the metric rows without metrics that depend on the speed of the machine."""
    return [metric_rows.without_timings(row) for row in metrics]


def find_callback(run: Run, kind: type[CallbackType]) -> CallbackType:
    """Returns the run's callback of class `kind`."""
    (found_callback,) = [callback for callback in run.callbacks if isinstance(callback, kind)]
    return found_callback
