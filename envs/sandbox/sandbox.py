"""Runs untrusted programs on this machine, and chooses an isolation level that works here.

    with Sandbox() as sandbox:
        run = sandbox.run("print(int(input()) + 1)", b"41\\n")     # run.stdout == b"42\\n"

The caller compares outputs; expected outputs never enter the sandbox. No file or process of a program outlives
its run. docs/sandbox.md describes the isolation levels and what each protects against.
`envs.sandbox.supervisor` is the process inside; `envs.sandbox.supervisor_client` talks to it.
"""

import contextlib
import functools
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from config.schema.errors import ConfigError
from envs.sandbox.languages import LANGUAGES, interpreter_command
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox_child import SETUP_FAILED
from envs.sandbox.supervisor_client import Job, ProgramResult, SandboxError, SupervisorClient

__all__ = ["LEVELS", "ProgramResult", "Sandbox", "SandboxError", "choose_level", "unavailable_reason"]

LEVELS = ("bubblewrap", "namespaces", "rlimits")
"""Strongest first."""
PROBE_SECONDS = 20.0

_log = logging.getLogger(__name__)


class Sandbox:
    """Runs programs one after another, each in a new process.

    The supervisor that forks these processes is kept between runs. Not for use by several threads at once. A
    forked copy of this object starts a supervisor of its own.

    Args:
        level: one of `LEVELS`, or `auto` for the first that works on this machine.
        limits: limits of each run.
        disabled_layers: protections left out (`filter`, `landlock`), so that tests can see the others hold.
        language: a key of `LANGUAGES`; function calls and assertions work in Python only.

    Raises:
        ConfigError: the level does not work on this machine, or with `auto` no level does; or the language
            needs a stronger level or an interpreter that is not installed.
    """

    def __init__(
        self,
        level: str = "auto",
        limits: Limits | None = None,
        disabled_layers: Sequence[str] = (),
        language: str = "python",
    ) -> None:
        self.interpreter = interpreter_command(language)
        self.file = LANGUAGES[language].file
        self.level = choose_level(level, bool(self.interpreter))
        self.limits = limits or Limits()
        self.disabled_layers = tuple(disabled_layers)
        if "filter" in self.disabled_layers and self.level == "rlimits":
            raise ValueError("level rlimits needs the system-call filter; remove `filter` from the disabled layers")
        self._supervisor: SupervisorClient | None = None

    def run(self, source: str, stdin: bytes = b"", wall_seconds: float | None = None) -> ProgramResult:
        """Runs a script for at most `wall_seconds`, or its limit if that is less.

        Raises:
            SandboxError: the sandbox failed, through no fault of the script.
        """
        return self._run_job(source, wall_seconds, stdin=stdin)

    def call_function(
        self, source: str, function: str, arguments: Sequence[Any], wall_seconds: float | None = None
    ) -> ProgramResult:
        """Loads a module and calls `function`, or `Solution().function`, with JSON arguments and result.

        Raises:
            SandboxError: as for `run`.
            TypeError, ValueError: JSON cannot hold the arguments.
        """
        return self._run_job(source, wall_seconds, function=function, arguments=json.dumps(arguments))

    def run_tests(self, source: str, tests: dict[str, Any], wall_seconds: float | None = None) -> ProgramResult:
        """Runs tests that are Python code on a module.

        The result's `value` has a line of JSON for each test that ended.

        tests: as for `envs.sandbox.assertions.tests_process.run_tests`.

        Raises:
            SandboxError: as for `run`.
        """
        run = self._run_job(source, wall_seconds, tests=tests)
        if run.code == SETUP_FAILED:
            raise SandboxError("the program could not be isolated")
        return run

    def _run_job(self, source: str, wall_seconds: float | None, **fields: Any) -> ProgramResult:
        limit = self.limits.wall_seconds
        seconds = limit if wall_seconds is None else min(wall_seconds, limit)
        job = Job(source.encode("utf-8", "replace"), seconds, **fields)
        if self._supervisor is not None and self._supervisor.is_usable():
            with contextlib.suppress(SandboxError):
                return self._supervisor.run_job(job)
        self.close()
        self._supervisor = SupervisorClient(self.level, self.limits, self.disabled_layers, self.interpreter, self.file)
        try:
            return self._supervisor.run_job(job)
        except SandboxError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the supervisor, and with it every process and file in the sandbox."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@functools.cache
def unavailable_reason(level: str) -> str | None:
    """Returns why a level does not work on this machine, or None if it does.

    The check runs a test program.
    """
    if sys.platform != "linux":
        return f"the level needs Linux, but the system is {sys.platform}"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        with contextlib.closing(SupervisorClient(level, Limits())) as supervisor:
            run = supervisor.run_job(Job(b"import decimal; print(6 * 7)", PROBE_SECONDS))
    except (SandboxError, OSError) as error:
        return str(error)
    return None if run.stdout == b"42\n" else f"a test program printed {run.stdout!r} {run.stderr!r}"


@functools.cache
def choose_level(level: str, starts_programs: bool = False) -> str:
    """Returns an isolation level that works on this machine.

    Logs a warning if `auto` finds only the weakest level.

    starts_programs: the tested programs start other programs, as a shell does, which `rlimits` cannot allow.

    Raises:
        ConfigError: the requested level does not work here, or with `auto` no level does.
    """
    candidates = LEVELS if level == "auto" else (level,)
    if candidates[0] not in LEVELS:
        raise ConfigError(f"env.sandbox={level!r}: choose one of auto, {', '.join(LEVELS)}")
    reasons: list[str] = []
    for candidate in candidates:
        reason = unavailable_reason(candidate)
        if candidate == "rlimits" and starts_programs:
            reason = "the level runs only Python, which starts no other programs"
        if reason is None:
            if candidate == "rlimits" and level == "auto":
                _log.warning(
                    "code runs at sandbox level rlimits, the weakest (docs/sandbox.md): %s", "; ".join(reasons)
                )
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(
        f"env.sandbox={level}: no sandbox level for tested code works here ({'; '.join(reasons)}); install "
        "bubblewrap, or allow user namespaces (docs/sandbox.md)"
    )
