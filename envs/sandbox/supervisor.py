"""Supervisor process inside the sandbox, which forks and kills one program's processes at a time.

    grader ──socket──▶ supervisor ──fork──▶ test      START, with descriptors: program, stdin; out, err, value
           ◀──────────                                REPLY: how it ended
           ◀──pipes──────────────────────── test      what it printed

`envs.sandbox.supervisor_client` starts it as a bare interpreter (no site-packages, empty environment). Its
forks are `envs.sandbox.sandbox_child.SandboxChild`. The supervisor never runs a line of a tested program, and
never reads a program, its input or its output, because these lie behind descriptors that it passes on. So its
memory, which every test inherits, holds nothing of earlier tests. The supervisor ends when its socket closes,
and ends every process that it started.
"""

import contextlib
import ctypes
import marshal
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

from envs.sandbox import isolation
from envs.sandbox.sandbox_child import READY, SandboxChild

LENGTH = struct.Struct("<I")
START, END = b"S", b"E"
MAX_DESCRIPTORS = 6
"""Largest number that comes with START: program, standard input, output and error, value; tests."""
REPLY = struct.Struct("<iid")
"""Error number of a failed fork or 0, exit code, CPU seconds."""
KILL_SECONDS = 10.0
GETDENTS_NUMBERS = {"x86_64": 217, "aarch64": 61}
"""System-call number of getdents64 by machine."""
EMPTY_DIRECTORY_BYTES = 48
"""Bytes that getdents64 returns for an empty directory: `.` and `..`."""
PRELOADED_MODULES = (
    *("bisect", "collections", "functools", "heapq", "itertools"),
    *("json", "math", "random", "re", "typing"),
)
"""Modules that most programs import, loaded once for all tests."""


def pack_settings(settings: dict[str, Any]) -> bytes:
    """Encodes settings as a length and a marshal body."""
    body = marshal.dumps(settings)
    return LENGTH.pack(len(body)) + body


def _receive_bytes(grader: socket.socket, size: int) -> bytes:
    """Receives exactly `size` bytes. Raises EOFError when the other end closes."""
    data = b""
    while len(data) < size:
        chunk = grader.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def main() -> None:
    """Reads the settings, enters the sandbox, serves until the grader closes its socket."""
    grader = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    (size,) = LENGTH.unpack(_receive_bytes(grader, LENGTH.size))
    settings = marshal.loads(_receive_bytes(grader, size))
    for name in PRELOADED_MODULES:
        __import__(name)
    if settings["level"] == "namespaces":
        isolation.unshare_namespaces()
    if settings["level"] != "bubblewrap":
        # A child continues, as process 1 of the new namespaces; this process only waits for its end. At level
        # rlimits the child outlives this process if a killed grader takes this process along: the child then
        # removes files.
        child = os.fork()
        if child:
            grader.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    if settings["level"] == "namespaces":
        isolation.die_with_parent()
        interpreter = settings["interpreter"]
        isolation.build_root(settings["disk_bytes"], isolation.program_paths(interpreter) if interpreter else ())
    isolation.hide_memory()
    if settings["level"] == "rlimits" and os.geteuid() == 0:
        os.chown(settings["directory"], settings["user"], settings["user"])
    supervisor = Supervisor(settings, grader)
    try:
        grader.sendall(READY)
        supervisor.serve()
    finally:
        supervisor.kill_all_processes()
        if settings["level"] == "rlimits":
            empty_directory(settings["directory"])
            os.rmdir(settings["directory"])


def empty_directory(directory: str) -> None:
    """Removes the content of a directory, however deeply nested.

    Subdirectories are first moved to the top, so that no path becomes too long.
    """
    queue = [directory]
    move_count = 0
    while queue:
        current = queue.pop()
        with os.scandir(current) as entries:
            listing = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_directory in listing:
            if not is_directory:
                os.unlink(path)
                continue
            target = f"{directory}/removed-{move_count}-{os.getpid()}"
            move_count += 1
            os.chmod(path, 0o700)
            os.rename(path, target)
            queue.append(target)
        if current != directory:
            os.rmdir(current)


def is_empty_directory(directory: str) -> bool:
    """Whether a directory is empty; names of its entries do not stay in memory."""
    entries = ctypes.create_string_buffer(4096)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    size = isolation.libc.syscall(GETDENTS_NUMBERS[os.uname().machine], fd, entries, len(entries))
    os.close(fd)
    ctypes.memset(entries, 0, len(entries))
    return int(size) == EMPTY_DIRECTORY_BYTES


class Supervisor:
    """Runs one test at a time.

    As process 1 of its own process-number namespace, it can kill all other processes in that namespace.
    """

    def __init__(self, settings: dict[str, Any], grader: socket.socket) -> None:
        self.settings, self.grader = settings, grader
        self.is_init = os.getpid() == 1
        self.wakeup_fd, wake = os.pipe()
        for fd in (self.wakeup_fd, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.directory_mode = os.stat(settings["directory"]).st_mode & 0o7777
        self.library_fds: list[int] = []
        if settings["level"] == "rlimits" and os.geteuid() == 0:
            self.library_fds = [os.open(path, os.O_PATH) for path in sys.path if os.path.isdir(path)]

    def serve(self) -> None:
        """Runs tests until the grader closes its socket."""
        while True:
            command, descriptors, _, _ = socket.recv_fds(self.grader, 1, MAX_DESCRIPTORS)
            if not command:
                return
            if command == START:  # otherwise END, for a test that had already ended by itself
                self._run_test(descriptors)
                self._clean_directory()

    def _run_test(self, descriptors: list[int]) -> None:
        reason, code, cpu = 0, 0, 0.0
        pids: list[int] = []
        try:
            pids = (
                self._fork_test_pair(descriptors)
                if len(descriptors) == MAX_DESCRIPTORS
                else [self._fork("run", descriptors)]
            )
        except OSError as error:
            reason = error.errno or -1
        for fd in descriptors:
            os.close(fd)
        try:
            if pids:
                code, cpu = self._wait_for_exit(pids[0])
        finally:
            for pid in pids[1:]:
                os.kill(pid, signal.SIGKILL)
        self.kill_all_processes()
        self.grader.sendall(REPLY.pack(reason, code, cpu))

    def _fork(self, task: str, *arguments: Any) -> int:
        """Forks a process that runs the method `task` of `SandboxChild`; returns its number."""
        pid = os.fork()
        if pid == 0:
            getattr(SandboxChild(self.settings, self.library_fds), task)(*arguments)
        return pid

    def _fork_test_pair(self, descriptors: list[int]) -> list[int]:
        """Forks the process of the tests and the process of the program.

        The tests' process decides on the verdicts. The program's process is forked before any process reads the
        tests.
        """
        program_end, tests_end = socket.socketpair()
        with program_end, tests_end:
            program = self._fork("serve", descriptors[:5], program_end.fileno())
            try:
                return [self._fork("test", descriptors, tests_end.fileno()), program]
            except OSError:
                os.kill(program, signal.SIGKILL)
                raise

    def _wait_for_exit(self, pid: int) -> tuple[int, float]:
        """Waits for the end of a test; returns its exit code and CPU seconds.

        The test ends by itself, or the grader orders its end.

        Raises:
            EOFError: the grader is gone.
        """
        poll = select.poll()
        for fd in (self.wakeup_fd, self.grader.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            for fd, _ in poll.poll():
                if fd == self.wakeup_fd:
                    os.read(fd, 4096)
                    continue
                command = self.grader.recv(1)
                os.kill(pid, signal.SIGKILL)
                if not command:
                    raise EOFError("the grader is gone")

    def _clean_directory(self) -> None:
        """Empties the private directory.

        A separate process does so, so that names of a program's files do not stay in this process's memory.
        """
        directory = self.settings["directory"]
        os.chmod(directory, self.directory_mode)
        if is_empty_directory(directory):
            return
        cleaner = os.fork()
        if cleaner == 0:
            try:
                empty_directory(directory)
                os._exit(0)
            finally:
                os._exit(1)
        os.waitpid(cleaner, 0)

    def kill_all_processes(self) -> None:
        """Kills every other process in the sandbox and waits for their end.

        Only process 1 kills. At level `rlimits` the supervisor is not process 1 and only reaps its children.

        Raises:
            TimeoutError: some processes still exist after `KILL_SECONDS`.
        """
        deadline = time.monotonic() + KILL_SECONDS
        while True:
            if self.is_init:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the sandbox waited {KILL_SECONDS:g} s for its killed processes to end")
            if pid == 0:
                time.sleep(0.001)
