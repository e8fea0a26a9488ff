"""The sandbox: runs programs that a model wrote, without network, within limits, and leaves nothing of them.

    with Sandbox() as sandbox:
        run = sandbox.run("print(int(input()) + 1)", b"41\\n")     # run.stdout == b"42\\n"

The caller compares outputs; expected ones never enter the sandbox. Levels and what each protects against are in
docs/sandbox.md. The inside is `envs.sandbox.runner`; `envs.sandbox.session` stands between.
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
from envs.sandbox.languages import LANGUAGES, command
from envs.sandbox.limits import Limits
from envs.sandbox.program import SETUP_FAILED
from envs.sandbox.session import Job, Run, SandboxError, Session

__all__ = ["LEVELS", "Run", "Sandbox", "SandboxError", "choose_level", "why_not"]

LEVELS = ("bubblewrap", "namespaces", "rlimits")
"""Strongest first."""
PROBE_SECONDS = 20.0

_log = logging.getLogger(__name__)


class Sandbox:
    """Runs programs one after another. Each run is a new process; the supervisor that forks it is kept.

    Not for use by several threads at once. A forked copy of this object starts a supervisor of its own.

    Args:
        level: one of `LEVELS`, or `auto` for the first that works here.
        limits: of each run.
        without: layers left out (`filter`, `landlock`), so that tests can see the others hold.
        language: a key of `LANGUAGES`; functions can be called and assertions checked in Python only.

    Raises:
        ConfigError: the level does not work here, or with `auto` none does; the language needs a stronger one or an
            interpreter that is not installed.
    """

    def __init__(
        self,
        level: str = "auto",
        limits: Limits | None = None,
        without: Sequence[str] = (),
        language: str = "python",
    ) -> None:
        self.interpreter = command(language)
        self.file = LANGUAGES[language].file
        self.level = choose_level(level, bool(self.interpreter))
        self.limits = limits or Limits()
        self.without = tuple(without)
        if "filter" in self.without and self.level == "rlimits":
            raise ValueError("at level rlimits only the system-call filter keeps processes in: it cannot go")
        self._session: Session | None = None

    def run(self, source: str, stdin: bytes = b"", wall_seconds: float | None = None) -> Run:
        """Runs a script, for at most `wall_seconds` where that is less than its limit.

        Raises:
            SandboxError: when it could not be run, through no fault of its own.
        """
        return self._job(source, wall_seconds, stdin=stdin)

    def call(
        self, source: str, function: str, arguments: Sequence[Any], wall_seconds: float | None = None
    ) -> Run:
        """Loads a module and calls `function`, or `Solution().function`; arguments and result pass as JSON.

        Raises:
            SandboxError: as for `run`.
            TypeError, ValueError: arguments that JSON cannot hold.
        """
        return self._job(source, wall_seconds, function=function, arguments=json.dumps(arguments))

    def check(self, source: str, tests: dict[str, Any], wall_seconds: float | None = None) -> Run:
        """Runs tests that are Python code on the module; the value has a line of JSON for each test that ended.

        tests: as `envs.sandbox.assertions.tests_side.run_tests` takes it.

        Raises:
            SandboxError: as for `run`.
        """
        run = self._job(source, wall_seconds, tests=tests)
        if run.code == SETUP_FAILED:
            raise SandboxError("the program could not be shut in")
        return run

    def _job(self, source: str, asked: float | None, **given: Any) -> Run:
        limit = self.limits.wall_seconds
        seconds = limit if asked is None else min(asked, limit)
        job = Job(source.encode("utf-8", "replace"), seconds, **given)
        if self._session is not None and self._session.usable():
            with contextlib.suppress(SandboxError):
                return self._session.job(job)
        self.close()
        self._session = Session(self.level, self.limits, self.without, self.interpreter, self.file)
        try:
            return self._session.job(job)
        except SandboxError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the supervisor, and with it all that might be left in the sandbox."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@functools.cache
def why_not(level: str) -> str | None:
    """None where the level works on this machine, else the reason; found out by running a program."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        with contextlib.closing(Session(level, Limits())) as session:
            run = session.job(Job(b"import decimal; print(6 * 7)", PROBE_SECONDS))
    except (SandboxError, OSError) as error:
        return str(error)
    return None if run.stdout == b"42\n" else f"a test program printed {run.stdout!r} {run.stderr!r}"


@functools.cache
def choose_level(level: str, starts_programs: bool = False) -> str:
    """A level that works here; a warning when `auto` finds only the weakest.

    starts_programs: what is run starts other programs, as a shell does, which `rlimits` cannot let it do.

    Raises:
        ConfigError: the level asked for, or with `auto` any, does not work here.
    """
    wanted = LEVELS if level == "auto" else (level,)
    if wanted[0] not in LEVELS:
        raise ConfigError(f"env.sandbox={level!r}: choose one of auto, {', '.join(LEVELS)}")
    reasons: list[str] = []
    for candidate in wanted:
        reason = why_not(candidate)
        if candidate == "rlimits" and starts_programs:
            reason = "it runs Python alone, which starts no other programs"
        if reason is None:
            if candidate == "rlimits" and level == "auto":
                _log.warning(
                    "code runs at sandbox level rlimits, the weakest (docs/sandbox.md): %s",
                    "; ".join(reasons),
                )
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(
        f"env.sandbox={level}: no way to shut tested code in works here ({'; '.join(reasons)}); "
        "install bubblewrap, or allow user namespaces (docs/sandbox.md)"
    )
