"""A session with one supervisor process, as the grader sees it: started, given jobs, held to deadlines, ended."""

import fcntl
import itertools
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.sandbox import isolation
from envs.sandbox.limits import Limits
from envs.sandbox.program import READY, write_all
from envs.sandbox.runner import END, REPLY, START, pack
from envs.sandbox.watch import Status, Watch

START_SECONDS = 30.0
GRACE_SECONDS = 15.0
STOP_SECONDS = 5.0
CPU_SLACK_SECONDS = 0.1
"""The kernel counts CPU time in ticks where it holds a program to its limit, and more finely where it reports it."""
RUNS_PER_SESSION = 500
INSIDE_DIRECTORY = "/tmp"
_sessions = itertools.count(1)


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing about the program."""


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


@dataclass(frozen=True)
class Job:
    """A program and its input. arguments: a JSON array, where a function of the program is called. tests: Python code
    that calls it, as `envs.sandbox.assertions.tests_side.run_tests` takes it; their preamble runs before the program
    too."""

    source: bytes
    wall_seconds: float
    stdin: bytes = b""
    function: str | None = None
    arguments: str = ""
    tests: dict[str, Any] | None = None


class Session:
    """One supervisor process and the socket to it.

    The grader tells the supervisor to start a program and when to end it; the supervisor replies how it ended. The
    program itself, its input and its output travel in descriptors that the supervisor passes on unread: it forks the
    next program too.
    """

    def __init__(
        self,
        level: str,
        limits: Limits,
        without: tuple[str, ...] = (),
        interpreter: Sequence[str] = (),
        file: str = "",
    ) -> None:
        """interpreter: the command that runs a program which stands in `file`; none: the supervisor's own Python."""
        self.owner = os.getpid()
        self.limits = limits
        self.runs = 0
        self.directory = tempfile.mkdtemp(prefix="sandbox-") if level == "rlimits" else None
        directory = self.directory or INSIDE_DIRECTORY
        settings = _settings(level, limits, without, directory)
        settings |= {"interpreter": list(interpreter), "file": file}
        self.watched = self.directory if settings["files"] == "landlock" else None
        root = str(Path(__file__).resolve().parents[2])
        start = (
            f"import sys; sys.path.insert(0, {root!r}); "
            "from envs.sandbox.runner import main; sys.path.pop(0); main()"
        )
        command = [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", start]
        command.append(f"sandbox of process {self.owner}")
        if level == "bubblewrap":
            command = [*_bubblewrap(limits, interpreter), *command]
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0", "HOME": directory, "TMPDIR": directory},
                bufsize=0,
                start_new_session=True,
            )
        try:
            self._send(pack(settings))
            self._receive(len(READY), START_SECONDS, "start")
        except SandboxError:
            self.close()
            raise

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.runs < RUNS_PER_SESSION and self.process.poll() is None

    def job(self, job: Job) -> Run:
        """Raises SandboxError when it could not be run, through no fault of its own."""
        self.runs += 1
        began = time.monotonic()
        limits = self.limits
        with Watch(limits.output_mib << 20, self.watched, limits.disk_mib << 20) as watch:
            self._start(job, watch)
            status = watch.until(self.socket.fileno(), began + job.wall_seconds)
            if status != "finished":
                self._send(END)
            reply = self._receive(REPLY.size, GRACE_SECONDS, "end a program")
            reason, code, cpu = REPLY.unpack(reply)
            stdout, stderr, value = watch.rest()
        wall = time.monotonic() - began
        if reason:
            raise SandboxError(f"a test could not be started: {os.strerror(reason)}")
        if status == "finished" and not value.startswith(READY):
            raise SandboxError(
                f"a test could not be shut in: {stderr.decode(errors='replace').strip()[-500:]}"
            )
        if status == "finished" and watch.overflow:
            status = "output"
        if status == "finished" and (code == -signal.SIGXCPU or cpu > limits.cpu_seconds + CPU_SLACK_SECONDS):
            status = "time"
        return Run(status, code, stdout, stderr, value[len(READY) :], cpu, wall)

    def _start(self, job: Job, watch: Watch) -> None:
        before = job.tests["preamble"].encode() if job.tests else b""
        program = marshal.dumps((job.source, job.function, before if job.tests else job.arguments))
        files = [_in_memory("program", program), _in_memory("stdin", job.stdin)]
        tests = [] if job.tests is None else [_in_memory("tests", marshal.dumps(job.tests))]
        try:
            self._send(START, [*files, *watch.theirs, *tests])
        finally:
            for fd in (*files, *tests):
                os.close(fd)
        watch.given()

    def _send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            if descriptors:
                socket.send_fds(self.socket, [data], descriptors)
            else:
                self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise self._failure("has ended") from None

    def _receive(self, size: int, seconds: float, what: str) -> bytes:
        deadline = time.monotonic() + seconds
        received = b""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while len(received) < size:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise self._failure(f"waited {seconds:g} s for it to {what}")
            try:
                piece = self.socket.recv(size - len(received))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise self._failure(f"ended before it could {what}")
            received += piece
        return received

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
        """Closes its socket, at which it ends all that it started; kills it when that takes too long."""
        self.socket.close()
        if self.owner != os.getpid():
            return
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _in_memory(name: str, data: bytes) -> int:
    """A file in memory that nobody can write to, read from its beginning."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _bubblewrap(limits: Limits, interpreter: Sequence[str]) -> list[str]:
    project = Path(__file__).resolve().parent
    modules = [project.parent / "__init__.py", *sorted(project.rglob("*.py"))]
    shown = isolation.program_paths(interpreter) if interpreter else []
    readable = [*isolation.readable_paths(), os.path.realpath(sys.executable), *map(str, modules), *shown]
    above = sorted({str(parent) for path in readable for parent in Path(path).parents} - {"/"})
    entered = [word for path in above for word in ("--perms", "0755", "--dir", path)]
    binds = [word for path in readable for word in ("--ro-bind", os.path.realpath(path), path)]
    devices = [word for path in isolation.DEVICES for word in ("--dev-bind", path, path)]
    names = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        names.append("--unshare-user")
    size = ["--perms", "1777", "--size", str(limits.disk_mib << 20), "--tmpfs", INSIDE_DIRECTORY]
    ends = ["--remount-ro", "/", "--die-with-parent", "--new-session", "--as-pid-1", "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *names, *entered, *binds, *devices, *size, *ends]


def _settings(level: str, limits: Limits, without: tuple[str, ...], directory: str) -> dict[str, Any]:
    """The settings that the supervisor is sent.

    files: what keeps the user's files from the program: a `root of its own`, `landlock`, or that it may change none.
    """
    # A user number that no other sandbox uses at this moment, so that limits on processes are its own.
    number = os.getpid() * 16 + next(_sessions) % 16
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    user = 2_000_000_000 + number if mapped > 2_100_000_000 else 20_000 + number % 40_000
    version = 0 if "landlock" in without else isolation.landlock_version()
    files = "root of its own" if level != "rlimits" else "landlock" if version else "none"
    return {
        "level": level,
        "directory": directory,
        "user": user,
        "files": files,
        "landlock": version,
        "filter": "filter" not in without,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_mib << 20,
        "threads": limits.threads,
        "open_files": limits.open_files,
        "file_bytes": 0 if files == "none" else limits.file_mib << 20,
        "disk_bytes": limits.disk_mib << 20,
    }
