"""Running the scripts: in this process where that shows the same, else in an interpreter of their own."""

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
from tests.composed import composed
from torchgrpo.monitoring import metrics as metric_rows
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped
from torchgrpo.run.sweep import SweepStart
from torchgrpo.run.training_run import Callback, Run

SCRIPTS = {"grpo.py": grpo, "grpo_async.py": grpo_async}
SCHEDULE_OF: dict[ModuleType, Any] = {grpo: Lockstep, grpo_async: Overlapped}
"""What each script's loop works with."""
CallbackType = TypeVar("CallbackType", bound=Callback)
ROOT = Path(__file__).resolve().parent.parent
QUICK = ("logging.progress=false", "logging.sample_frequency=0", "train_model.num_threads=1")
ENVIRONMENT = dict(os.environ)
"""As the tests found it: engines in this process leave variables behind, some with another value each time."""
DEADLINE_S = 900.0
"""After this long a script counts as hung."""
_OF_RUNS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def configured(*overrides: str, name: str = "grpo_quickstart") -> Config:
    return to_config(composed(name, *QUICK, *overrides))


# --- in this process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a script. output: both streams, in their order."""

    returncode: int
    stdout: str
    stderr: str
    output: str


class _Stream(io.StringIO):
    """An output that also writes to `joined`."""

    def __init__(self, joined: io.StringIO) -> None:
        super().__init__()
        self._joined = joined

    def write(self, text: str) -> int:
        self._joined.write(text)
        return super().write(text)


def called(script: str, *arguments: str, modules: Path | None = None) -> Ended:
    """`python SCRIPT ARGUMENTS` by a call of its `main`.

    modules: folder of the user's modules, first on the import path; they are forgotten afterwards.
    """
    joined = io.StringIO()
    stdout, stderr = _Stream(joined), _Stream(joined)
    code: Any = 0
    with ExitStack() as changed:
        changed.enter_context(_process_state())
        if modules is not None:
            changed.enter_context(_user_modules(modules))
        changed.enter_context(patch.object(sys, "argv", [script, *arguments]))
        changed.enter_context(redirect_stdout(stdout))
        changed.enter_context(redirect_stderr(stderr))
        try:
            SCRIPTS[script].main()
        except SystemExit as ended:
            code = ended.code or 0
    return Ended(code, stdout.getvalue(), stderr.getvalue(), joined.getvalue())


def ran(
    script: str,
    run_dir: Path,
    *overrides: str,
    name: str = "grpo_quickstart",
    modules: Path | None = None,
) -> Ended:
    """A small run by a call of the script's `main`; see `called`."""
    return called(script, *_arguments(run_dir, overrides, name), modules=modules)


@contextmanager
def _process_state() -> Iterator[None]:
    """Put back what a script changes in its process: variables, signals, loggers, Hydra's own state."""
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
                    with suppress(OSError):  # of a log on a full disk
                        handler.close()
        root.handlers, root.level, logging.raiseExceptions = handlers, level, raises
        own.handlers, own.level, own.propagate = own_handlers, own_level, propagates
        for number, handler_of in signals.items():
            signal.signal(number, handler_of)
        os.environ.clear()
        os.environ.update(variables)


@contextmanager
def _user_modules(folder: Path) -> Iterator[None]:
    """`folder` on the import path, also of child processes; what was imported from it is forgotten."""
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


def start(
    script: str,
    run_dir: Path,
    *overrides: str,
    name: str = "grpo_quickstart",
    environment: Mapping[str, str] = ENVIRONMENT,
    enter: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """The script as a user starts it, stdout and stderr joined.

    enter: the command that starts the interpreter, as in other namespaces.
    """
    command = [script, *_arguments(run_dir, overrides, name)]
    return begin(command, environment=environment, stderr=subprocess.STDOUT, enter=enter)


def begin(
    command: Sequence[str],
    cwd: Path = ROOT,
    environment: Mapping[str, str] = ENVIRONMENT,
    stderr: int = subprocess.PIPE,
    enter: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """`python COMMAND`."""
    return subprocess.Popen(
        [*enter, sys.executable, *command],
        cwd=cwd,
        env={**_OF_RUNS, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def ended(
    command: Sequence[str], cwd: Path = ROOT, environment: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Exit code and both outputs of `python COMMAND`."""
    process = begin(command, cwd, environment)
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def finish(process: subprocess.Popen[str], timeout: float = DEADLINE_S) -> str:
    """Output of a process that has ended; it is killed where the time is over first."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise AssertionError(f"after {timeout} s still running:\n{process.communicate()[0]}") from error


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = DEADLINE_S
) -> None:
    """Poll until the condition holds; fails when the process ends or the time is over first."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"the script ended early:\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"after {timeout} s still waiting:\n{process.communicate()[0]}")
        time.sleep(0.05)


def _arguments(run_dir: Path, overrides: Sequence[str], name: str) -> list[str]:
    return ["--config-name", name, f"hydra.run.dir={run_dir}", *QUICK, *overrides]


# --- what a run has left --------------------------------------------------------------------------------------


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_clocks(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows less what depends on how fast the machine was."""
    return [metric_rows.without_clocks(row) for row in metrics]


def callback_of(run: Run, kind: type[CallbackType]) -> CallbackType:
    """The run's callback of a class."""
    (found,) = [callback for callback in run.callbacks if isinstance(callback, kind)]
    return found
