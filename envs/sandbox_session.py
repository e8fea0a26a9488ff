"""One supervisor process as the grader sees it: started at a level, given jobs, held to deadlines, ended."""

import fcntl
import marshal
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from envs import sandbox_isolation
from envs.sandbox_program import READY, write_all
from envs.sandbox_runner import ANSWER, JOB, STATUS, STOP

Status = Literal["finished", "time", "output", "disk"]

START_SECONDS = 30.0
GRACE_SECONDS = 15.0
STOP_SECONDS = 5.0
RUNS_PER_SESSION = 500
ERROR_BYTES = 8192
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
    """What a test's process is asked to run. `arguments`: a JSON array, for a function."""
    return {
        "source": source.encode("utf-8", "replace"),
        "wall_seconds": float(wall_seconds),
        "stdin": stdin,
        "function": function,
        "arguments": arguments,
    }


class Session:
    """One supervisor process and the socket to it."""

    def __init__(self, level: str, limits: Limits, without: tuple[str, ...]) -> None:
        self.owner = os.getpid()
        self.limits = limits
        self.runs = 0
        self.directory = tempfile.mkdtemp(prefix="sandbox-") if level == "rlimits" else None
        directory = self.directory or INSIDE_DIRECTORY
        command = [*_interpreter(), f"sandbox of process {self.owner}"]
        if level == "bubblewrap":
            command = [*_bubblewrap(limits), *command]
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
            self._send(marshal.dumps(_settings(level, limits, without, directory)))
            self._wait(time.monotonic() + START_SECONDS, f"waited {START_SECONDS:g} s for it to start")
            self._receive("start")
        except SandboxError:
            self.close()
            raise

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.runs < RUNS_PER_SESSION and self.process.poll() is None

    def job(self, job: dict[str, Any]) -> Run:
        self.runs += 1
        ends = [os.pipe() for _ in range(3)]
        printed = Printed([reading for reading, _ in ends], self.limits.output_mib << 20)
        inputs = [sealed(marshal.dumps(job)), sealed(job["stdin"])]
        handed = [*inputs, *(writing for _, writing in ends)]
        try:
            try:
                self._send(JOB.pack(job["wall_seconds"]), handed)
            finally:
                for fd in handed:
                    os.close(fd)
            answer = self._collect(printed, job["wall_seconds"] + GRACE_SECONDS)
            printed.drain()
        finally:
            printed.close()
        status, code, cpu, wall = ANSWER.unpack(answer)
        name = "output" if printed.overflow else STATUS[status]
        stdout, stderr, value = map(bytes, printed.texts)
        if name == "broken" or (name == "finished" and not value.startswith(READY)):
            raise SandboxError(
                f"a test could not be shut in: {stderr.decode(errors='replace').strip()[-500:]}"
            )
        return Run(cast(Status, name), code, stdout, stderr, value[1:], cpu, wall)

    def _collect(self, printed: "Printed", patience: float) -> bytes:
        """The supervisor's answer; until it comes, what the test prints is read."""
        deadline = time.monotonic() + patience
        poll = select.poll()
        for fd in (self.socket.fileno(), *printed.open):
            poll.register(fd, select.POLLIN)
        stopped = False
        while True:
            ready = self._wait(deadline, f"waited {patience:g} s for it to answer", poll)
            if self.socket.fileno() in ready:
                return self._receive("answer")
            for fd in ready:
                if not printed.read(fd):
                    poll.unregister(fd)
            if printed.overflow and not stopped:
                self._send(STOP)
                stopped = True

    def _send(self, message: bytes, files: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.socket, [message], files)
        except (BrokenPipeError, ConnectionResetError):
            raise self._failure("has ended") from None

    def _receive(self, what: str) -> bytes:
        try:
            message = self.socket.recv(ANSWER.size)
        except ConnectionResetError:
            message = b""
        if not message:
            raise self._failure(f"ended before it could {what}")
        return message

    def _wait(self, deadline: float, what: str, poll: "select.poll | None" = None) -> list[int]:
        """The file descriptors that can be read, of the socket alone without a `poll`."""
        if poll is None:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
        events = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        if not events:
            raise self._failure(what)
        return [fd for fd, _ in events]

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
        """Closes the socket, at which it ends all that it started; kills it when that takes too long."""
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


class Printed:
    """What a test prints: its output, its errors, and the value of its function, each up to a limit."""

    def __init__(self, fds: list[int], longest: int) -> None:
        self.fds = fds
        self.open = {fd: stream for stream, fd in enumerate(fds)}
        self.texts = (bytearray(), bytearray(), bytearray())
        self.limits = (longest, ERROR_BYTES, longest)
        self.overflow = False
        """Output or value were longer; of errors the rest is dropped."""
        for fd in fds:
            os.set_blocking(fd, False)

    def read(self, fd: int) -> bool:
        """False at the end of the stream, and where there is nothing to read."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            del self.open[fd]
            return False
        stream = self.open[fd]
        room = self.limits[stream] - len(self.texts[stream])
        self.texts[stream].extend(data[:room])
        self.overflow |= len(data) > room and self.limits[stream] > ERROR_BYTES
        return True

    def drain(self) -> None:
        """What is still in the pipes when the last process of the test has ended."""
        for fd in list(self.open):
            while self.read(fd):
                pass

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def sealed(data: bytes) -> int:
    """A file in memory that nobody can write to, at its beginning."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


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
    wanted = level == "rlimits" and "landlock" not in without
    landlock = sandbox_isolation.landlock_version() if wanted else 0
    unwatched = level == "rlimits" and landlock == 0
    return {
        "level": level,
        "directory": directory,
        "user": _unprivileged_user(),
        "landlock": landlock,
        "filter": "filter" not in without,
        "without_files": unwatched,
        "watch_disk": landlock > 0,
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
