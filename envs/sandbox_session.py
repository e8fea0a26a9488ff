"""One supervisor process as the grader sees it: started at a level, given jobs, held to deadlines, ended."""

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from envs import sandbox_isolation
from envs.sandbox_program import READY
from envs.sandbox_runner import ANSWER, STATUS, pack_request

Status = Literal["finished", "time", "output", "disk"]

START_SECONDS = 30.0
GRACE_SECONDS = 15.0
STOP_SECONDS = 5.0
RUNS_PER_SESSION = 500
INSIDE_DIRECTORY = "/tmp"


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


def make_job(
    source: str, wall_seconds: float, stdin: bytes = b"", function: str | None = None, arguments: str = ""
) -> dict[str, Any]:
    """What a supervisor is asked to run. `arguments`: a JSON array, for a function."""
    return {
        "source": source.encode("utf-8", "replace"),
        "wall_seconds": float(wall_seconds),
        "stdin": stdin,
        "function": function,
        "arguments": arguments,
    }


class Session:
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
        patience = job["wall_seconds"] + GRACE_SECONDS
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
        for stream in streams[:2]:
            if stream is not None:
                stream.close()
        if self.owner != os.getpid():
            return
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
    return [
        shutil.which("bwrap") or "bwrap",
        *names,
        *entered,
        *binds,
        *devices,
        *size,
        "--remount-ro",
        "/",
        *ends,
    ]


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
