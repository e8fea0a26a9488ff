"""Client of one sandbox supervisor process: starts it and runs untrusted programs through it."""

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
from envs.sandbox.program_monitor import ProgramMonitor, ProgramStatus
from envs.sandbox.sandbox_child import READY, write_all
from envs.sandbox.supervisor import END, REPLY, START, pack_settings

START_SECONDS = 30.0
GRACE_SECONDS = 15.0
STOP_SECONDS = 5.0
CPU_SLACK_SECONDS = 0.1
"""Tolerance: the kernel enforces CPU limits in ticks, but reports CPU time more finely."""
RUNS_PER_SUPERVISOR = 500
PRIVATE_DIRECTORY = "/tmp"
_client_numbers = itertools.count(1)


class SandboxError(RuntimeError):
    """A failure of the sandbox itself, which is no result of the program."""


@dataclass(frozen=True)
class ProgramResult:
    """Result of one run of a program.

    status: `finished` (the program ended by itself or by a signal that it caused), or the limit that ended the
    run. code: exit code; minus the signal's number if a signal ended the program. value: JSON of the function's
    result; empty for scripts.
    """

    status: ProgramStatus
    code: int
    stdout: bytes
    stderr: bytes
    value: bytes
    cpu_seconds: float
    wall_seconds: float

    @property
    def is_success(self) -> bool:
        """Whether the program ended by itself, without an error."""
        return self.status == "finished" and self.code == 0


@dataclass(frozen=True)
class Job:
    """A program and its input.

    arguments: a JSON array for `function`, a function of the program. tests: Python code that calls the program, as
    for `envs.sandbox.assertions.tests_process.run_tests`; the preamble of the tests runs before the program too.
    """

    source: bytes
    wall_seconds: float
    stdin: bytes = b""
    function: str | None = None
    arguments: str = ""
    tests: dict[str, Any] | None = None


class SupervisorClient:
    """Client of one supervisor process, which it starts, and the socket to it.

    The grader orders the supervisor to start a program and to end it; the supervisor replies with the exit code
    and CPU time. Program, input and output travel in descriptors that the supervisor passes on unread, because
    the supervisor also forks the next program.
    """

    def __init__(
        self,
        level: str,
        limits: Limits,
        disabled_layers: tuple[str, ...] = (),
        interpreter: Sequence[str] = (),
        file: str = "",
    ) -> None:
        """Starts the supervisor.

        interpreter: the command that runs a program in `file`; empty: the supervisor's own Python.

        Raises:
            SandboxError: the supervisor does not start.
        """
        self.owner = os.getpid()
        self.limits = limits
        self.runs = 0
        self.directory = tempfile.mkdtemp(prefix="sandbox-") if level == "rlimits" else None
        directory = self.directory or PRIVATE_DIRECTORY
        settings = _supervisor_settings(level, limits, disabled_layers, directory)
        settings |= {"interpreter": list(interpreter), "file": file}
        self.monitored_directory = self.directory if settings["files"] == "landlock" else None
        root = str(Path(__file__).resolve().parents[2])
        start = (
            f"import sys; sys.path.insert(0, {root!r}); "
            "from envs.sandbox.supervisor import main; sys.path.pop(0); main()"
        )
        command = [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", start]
        command.append(f"sandbox of process {self.owner}")
        if level == "bubblewrap":
            command = [*_bubblewrap_command(limits, interpreter), *command]
        self.socket, supervisor_socket = socket.socketpair()
        with supervisor_socket:
            self.process = subprocess.Popen(
                command,
                stdin=supervisor_socket.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0", "HOME": directory, "TMPDIR": directory},
                bufsize=0,
                start_new_session=True,
            )
        try:
            self._send(pack_settings(settings))
            self._receive(len(READY), START_SECONDS, "start")
        except SandboxError:
            self.close()
            raise

    def is_usable(self) -> bool:
        """Whether this process may run another job through the supervisor."""
        return self.owner == os.getpid() and self.runs < RUNS_PER_SUPERVISOR and self.process.poll() is None

    def run_job(self, job: Job) -> ProgramResult:
        """Runs a program. Raises SandboxError if the sandbox failed."""
        self.runs += 1
        began = time.monotonic()
        limits = self.limits
        with ProgramMonitor(limits.output_mib << 20, self.monitored_directory, limits.disk_mib << 20) as monitor:
            self._send_job(job, monitor)
            status = monitor.wait_for_reply(self.socket.fileno(), began + job.wall_seconds)
            if status != "finished":
                self._send(END)
            reply = self._receive(REPLY.size, GRACE_SECONDS, "end a program")
            reason, code, cpu = REPLY.unpack(reply)
            stdout, stderr, value = monitor.read_output()
        wall = time.monotonic() - began
        if reason:
            raise SandboxError(f"a test could not be started: {os.strerror(reason)}")
        if status == "finished" and not value.startswith(READY):
            raise SandboxError(f"a test could not be isolated: {stderr.decode(errors='replace').strip()[-500:]}")
        if status == "finished" and monitor.overflow:
            status = "output"
        if status == "finished" and (code == -signal.SIGXCPU or cpu > limits.cpu_seconds + CPU_SLACK_SECONDS):
            status = "time"
        return ProgramResult(status, code, stdout, stderr, value[len(READY) :], cpu, wall)

    def _send_job(self, job: Job, monitor: ProgramMonitor) -> None:
        preamble = job.tests["preamble"].encode() if job.tests else b""
        program = marshal.dumps((job.source, job.function, preamble if job.tests else job.arguments))
        files = [_memory_file("program", program), _memory_file("stdin", job.stdin)]
        tests = [] if job.tests is None else [_memory_file("tests", marshal.dumps(job.tests))]
        try:
            self._send(START, [*files, *monitor.write_ends, *tests])
        finally:
            for fd in (*files, *tests):
                os.close(fd)
        monitor.close_write_ends()

    def _send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            if descriptors:
                socket.send_fds(self.socket, [data], descriptors)
            else:
                self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise self._failure("has ended") from None

    def _receive(self, size: int, seconds: float, action: str) -> bytes:
        """Receives exactly `size` bytes within `seconds`. action: the awaited action, for error messages."""
        deadline = time.monotonic() + seconds
        data = b""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while len(data) < size:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise self._failure(f"did not {action} within {seconds:g} s")
            try:
                chunk = self.socket.recv(size - len(data))
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise self._failure(f"ended before it could {action}")
            data += chunk
        return data

    def _failure(self, problem: str) -> SandboxError:
        """Kills the supervisor, and returns an error with its last message."""
        assert self.process.stderr is not None
        self.process.kill()
        os.set_blocking(self.process.stderr.fileno(), False)
        stderr = (self.process.stderr.read() or b"").decode(errors="replace").strip()
        lines = stderr.splitlines() or ["no message"]
        return SandboxError(
            f"the sandbox's supervisor (pid {self.process.pid}) {problem}; its last message: {lines[-1][:500]}"
        )

    def close(self) -> None:
        """Ends the supervisor by closing its socket; kills the supervisor after `STOP_SECONDS`."""
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


def _memory_file(name: str, data: bytes) -> int:
    """Creates a read-only file in memory, positioned at its beginning; returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _bubblewrap_command(limits: Limits, interpreter: Sequence[str]) -> list[str]:
    """Returns the `bwrap` command line that isolates a supervisor."""
    project = Path(__file__).resolve().parent
    modules = [project.parent / "__init__.py", *sorted(project.rglob("*.py"))]
    programs = isolation.program_paths(interpreter) if interpreter else []
    readable = [*isolation.readable_paths(), os.path.realpath(sys.executable), *map(str, modules), *programs]
    above = sorted({str(parent) for path in readable for parent in Path(path).parents} - {"/"})
    directories = [word for path in above for word in ("--perms", "0755", "--dir", path)]
    binds = [word for path in readable for word in ("--ro-bind", os.path.realpath(path), path)]
    devices = [word for path in isolation.DEVICES for word in ("--dev-bind", path, path)]
    names = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        names.append("--unshare-user")
    size = ["--perms", "1777", "--size", str(limits.disk_mib << 20), "--tmpfs", PRIVATE_DIRECTORY]
    ends = ["--remount-ro", "/", "--die-with-parent", "--new-session", "--as-pid-1", "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *names, *directories, *binds, *devices, *size, *ends]


def _supervisor_settings(
    level: str, limits: Limits, disabled_layers: tuple[str, ...], directory: str
) -> dict[str, Any]:
    """Returns the settings that are sent to the supervisor.

    Their key `files` names the protection of the user's files: a `root of its own`, `landlock`, or `none`, with
    which a program may change no file at all.
    """
    # A user number that no other running sandbox uses, so that limits on processes are not shared.
    number = os.getpid() * 16 + next(_client_numbers) % 16
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    user = 2_000_000_000 + number if mapped > 2_100_000_000 else 20_000 + number % 40_000
    version = 0 if "landlock" in disabled_layers else isolation.landlock_version()
    files = "root of its own" if level != "rlimits" else "landlock" if version else "none"
    return {
        "level": level,
        "directory": directory,
        "user": user,
        "files": files,
        "landlock": version,
        "filter": "filter" not in disabled_layers,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_mib << 20,
        "threads": limits.threads,
        "open_files": limits.open_files,
        "file_bytes": 0 if files == "none" else limits.file_mib << 20,
        "disk_bytes": limits.disk_mib << 20,
    }
