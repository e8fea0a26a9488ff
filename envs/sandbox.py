"""Runs programs that a model wrote: without network, within limits, and with nothing left of them afterwards.

    with Sandbox() as sandbox:
        run = sandbox.run("print(int(input()) + 1)", b"41\\n")     # run.stdout == b"42\\n"

The caller compares outputs; expected ones never enter the sandbox. Levels and what each protects against are in
docs/sandbox.md. The inside is `envs.sandbox_runner`.
"""

import contextlib
import functools
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from config.errors import ConfigError
from envs import sandbox_isolation
from envs.sandbox_program import READY
from envs.sandbox_runner import ANSWER, STATUS, pack_request

Status = Literal["finished", "time", "output", "disk"]

LEVELS = ("bubblewrap", "namespaces", "rlimits")
"""Strongest first."""
START_SECONDS = 30.0
GRACE_SECONDS = 15.0
STOP_SECONDS = 5.0
RUNS_PER_SESSION = 500
INSIDE_DIRECTORY = "/tmp"

_log = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """The sandbox itself failed: no verdict about the program."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use."""

    wall_seconds: float = 6.0
    cpu_seconds: int = 5
    memory_mib: int = 512
    """Address space."""
    threads: int = 32
    open_files: int = 64
    file_mib: int = 16
    """Size of one file."""
    disk_mib: int = 32
    """All files together; there can be 1024 of them."""
    output_mib: int = 8
    """Standard output, and the JSON of a function's result."""


@dataclass(frozen=True)
class Run:
    """What came of one run.

    status: `finished` (by itself or a signal of its own doing), or the limit that ended it.
    code: exit code; minus the signal's number if one ended it.
    value: JSON of the function's result; empty for scripts.
    """

    status: Status
    code: int
    stdout: bytes
    stderr: bytes
    value: bytes
    cpu_seconds: float
    wall_seconds: float

    @property
    def succeeded(self) -> bool:
        """It ended by itself, without an error."""
        return self.status == "finished" and self.code == 0


class Sandbox:
    """Runs programs one after another. Each run is a new process; the supervisor that forks it is kept.

    Not for use by several threads at once. A forked copy of this object starts a supervisor of its own.

    Args:
        level: one of `LEVELS`, or `auto` for the first that works here.
        limits: of each run.
        without: layers left out (`filter`, `landlock`), so that tests can see the others hold.

    Raises:
        ConfigError: the level does not work here, or with `auto` none does.
    """

    def __init__(
        self, level: str = "auto", limits: Limits | None = None, without: Sequence[str] = ()
    ) -> None:
        self.level = choose_level(level)
        self.limits = limits or Limits()
        self.without = tuple(without)
        if "filter" in self.without and self.level == "rlimits":
            raise ValueError("at level rlimits only the system-call filter keeps processes in: it cannot go")
        self._session: _Session | None = None

    def run(self, source: str, stdin: bytes = b"") -> Run:
        """Runs a script.

        Raises:
            SandboxError: when it could not be run, through no fault of its own.
        """
        return self._job({"source": _encoded(source), "stdin": stdin, "function": None, "arguments": ""})

    def call(self, source: str, function: str, arguments: Sequence[Any]) -> Run:
        """Loads a module and calls `function`, or `Solution().function`; arguments and result pass as JSON.

        Raises:
            SandboxError: as for `run`.
            TypeError, ValueError: arguments that JSON cannot hold.
        """
        job = {
            "source": _encoded(source),
            "stdin": b"",
            "function": function,
            "arguments": json.dumps(arguments),
        }
        return self._job(job)

    def _job(self, job: dict[str, Any]) -> Run:
        session = self._session
        if session is not None and session.usable():
            with contextlib.suppress(SandboxError):
                return session.job(job)
        self._session = session = self._replace(session)
        try:
            return session.job(job)
        except SandboxError:
            self.close()
            raise

    def _replace(self, session: "_Session | None") -> "_Session":
        if session is not None:
            session.close()
        return _Session(self.level, self.limits, self.without)

    def close(self) -> None:
        """Ends the supervisor, and with it all that might be left in the sandbox."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _encoded(source: str) -> bytes:
    return source.encode("utf-8", "replace")


class _Session:
    """One supervisor process and the two pipes to it."""

    def __init__(self, level: str, limits: Limits, without: tuple[str, ...]) -> None:
        self.owner = os.getpid()
        self.limits = limits
        self.runs = 0
        self.directory = tempfile.mkdtemp(prefix="sandbox-") if level == "rlimits" else None
        directory = self.directory or INSIDE_DIRECTORY
        command = [*_interpreter(), f"sandbox of process {self.owner}"]
        if level == "bubblewrap":
            command = [*_bubblewrap(limits), *command]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0", "HOME": directory, "TMPDIR": directory},
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._send(_settings(level, limits, without, directory), START_SECONDS)
            self._receive(len(READY), START_SECONDS, "start")
        except SandboxError:
            self.close()
            raise

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.runs < RUNS_PER_SESSION and self.process.poll() is None

    def job(self, job: dict[str, Any]) -> Run:
        self.runs += 1
        patience = self.limits.wall_seconds + GRACE_SECONDS
        self._send(job, patience)
        header = self._receive(ANSWER.size, patience, "answer")
        status, code, cpu, wall, *sizes = ANSWER.unpack(header)
        stdout, stderr, value = (self._receive(size, GRACE_SECONDS, "send a result") for size in sizes)
        name = STATUS[status]
        if name == "broken":
            raise SandboxError(
                f"a test could not be shut in: {stderr.decode(errors='replace').strip()[-500:]}"
            )
        return Run(cast(Status, name), code, stdout, stderr, value, cpu, wall)

    def _send(self, request: dict[str, Any], seconds: float) -> None:
        assert self.process.stdin is not None
        fd = self.process.stdin.fileno()
        os.set_blocking(fd, False)
        data = memoryview(pack_request(request))
        deadline = time.monotonic() + seconds
        while data:
            self._wait(fd, select.POLLOUT, deadline, f"waited {seconds:g} s for it to take a program")
            try:
                data = data[os.write(fd, data) :]
            except BrokenPipeError:
                raise self._failure("has ended") from None

    def _receive(self, size: int, seconds: float, what: str) -> bytes:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + seconds
        received = bytearray()
        while len(received) < size:
            self._wait(fd, select.POLLIN, deadline, f"waited {seconds:g} s for it to {what}")
            part = os.read(fd, min(size - len(received), 1 << 20))
            if not part:
                raise self._failure(f"ended before it could {what}")
            received += part
        return bytes(received)

    def _wait(self, fd: int, event: int, deadline: float, what: str) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise self._failure(what)

    def _failure(self, what: str) -> SandboxError:
        """Ends the supervisor and says why."""
        assert self.process.stderr is not None
        self.process.kill()
        os.set_blocking(self.process.stderr.fileno(), False)
        said = (self.process.stderr.read() or b"").decode(errors="replace").strip()
        lines = said.splitlines() or ["no message"]
        return SandboxError(
            f"the sandbox's supervisor (pid {self.process.pid}): {what}; it said: {lines[-1][:500]}"
        )

    def close(self) -> None:
        """Closes its input, at which it ends all that it started; kills it when that takes too long."""
        streams = [self.process.stdin, self.process.stdout, self.process.stderr]
        if self.owner != os.getpid():
            return
        for stream in streams[:2]:
            if stream is not None:
                stream.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if streams[2] is not None:
            streams[2].close()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _interpreter() -> list[str]:
    root = str(Path(__file__).resolve().parent.parent)
    start = f"import sys; sys.path.insert(0, {root!r}); from envs.sandbox_runner import main; sys.path.pop(0); main()"
    return [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", start]


def _bubblewrap(limits: Limits) -> list[str]:
    project = Path(__file__).resolve().parent
    modules = [project / "__init__.py", *sorted(project.glob("sandbox_*.py"))]
    readable = [*sandbox_isolation.readable_paths(), os.path.realpath(sys.executable), *map(str, modules)]
    above = sorted({str(parent) for path in readable for parent in Path(path).parents} - {"/"})
    entered = [part for path in above for part in ("--perms", "0755", "--dir", path)]
    binds = [part for path in readable for part in ("--ro-bind", os.path.realpath(path), path)]
    devices = [part for path in sandbox_isolation.DEVICES for part in ("--dev-bind", path, path)]
    names = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        names.append("--unshare-user")
    size = ["--perms", "1777", "--size", str(limits.disk_mib << 20), "--tmpfs", INSIDE_DIRECTORY]
    ends = ["--die-with-parent", "--new-session", "--as-pid-1", "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *names, *entered, *binds, *devices, *size, "--remount-ro", "/", *ends]


def _settings(level: str, limits: Limits, without: tuple[str, ...], directory: str) -> dict[str, Any]:
    landlock = level == "rlimits" and "landlock" not in without and sandbox_isolation.landlock_version() > 0
    unwatched = level == "rlimits" and not landlock
    return {
        "level": level,
        "directory": directory,
        "user": _unprivileged_user(),
        "landlock": landlock,
        "filter": "filter" not in without,
        "without_files": unwatched,
        "watch_disk": landlock,
        "wall_seconds": float(limits.wall_seconds),
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_mib << 20,
        "threads": limits.threads,
        "open_files": limits.open_files,
        "file_bytes": 0 if unwatched else limits.file_mib << 20,
        "disk_bytes": limits.disk_mib << 20,
        "output_bytes": limits.output_mib << 20,
    }


_sessions = 0


def _unprivileged_user() -> int:
    """A user number that no other sandbox uses at this moment, so that limits on processes are its own."""
    global _sessions
    _sessions += 1
    number = os.getpid() * 16 + _sessions % 16
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return 2_000_000_000 + number if mapped > 2_100_000_000 else 20_000 + number % 40_000


@functools.cache
def why_not(level: str) -> str | None:
    """None where the level works on this machine, else the reason; found out by running a program."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        session = _Session(level, Limits(wall_seconds=20.0), ())
        try:
            job = {"source": b"import decimal; print(6 * 7)", "stdin": b"", "function": None, "arguments": ""}
            run = session.job(job)
        finally:
            session.close()
    except (SandboxError, OSError) as error:
        return str(error)
    return None if run.stdout == b"42\n" else f"a test program printed {run.stdout!r} {run.stderr!r}"


@functools.cache
def choose_level(level: str) -> str:
    """A level that works here; a warning when `auto` finds only the weakest.

    Raises:
        ConfigError: the level asked for, or with `auto` any, does not work here.
    """
    wanted = LEVELS if level == "auto" else (level,)
    if wanted[0] not in LEVELS:
        raise ConfigError(f"env.sandbox={level!r}: choose one of auto, {', '.join(LEVELS)}")
    reasons: list[str] = []
    for candidate in wanted:
        reason = why_not(candidate)
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
