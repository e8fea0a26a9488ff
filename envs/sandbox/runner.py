"""The supervisor, which is the process inside the sandbox: it forks one process per test (`program`).

    grader ──socket──▶ supervisor ──fork──▶ test      START, with descriptors: program, stdin; out, err, value
           ◀──────────                                REPLY: how it ended
           ◀──pipes──────────────────────── test      what it printed

Started by `envs.sandbox.sandbox` as a bare interpreter (no site-packages, empty environment). The supervisor never runs
a line of a tested program, and never reads one, its input or its output: these lie behind descriptors it hands on.
So its memory, which every test begins with, holds nothing of the tests before. It ends when its socket closes, and
with it ends everything that it started.
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
from envs.sandbox.program import READY, Tested

LENGTH = struct.Struct("<I")
START, END = b"S", b"E"
DESCRIPTORS = 6
"""That come with START, at most: the program, standard input, standard output, standard error, the value; the tests."""
REPLY = struct.Struct("<iid")
"""The error number where it could not be forked, exit code, CPU seconds."""
KILL_SECONDS = 10.0
GET_ENTRIES = {"x86_64": 217, "aarch64": 61}
"""The number of getdents64."""
NO_ENTRIES = 48
"""Bytes that it gives of an empty directory: `.` and `..`."""
PRELOADED = (
    *("bisect", "collections", "functools", "heapq", "itertools"),
    *("json", "math", "random", "re", "typing"),
)
"""What most programs import: loaded once here, it costs a test nothing."""


def pack(settings: dict[str, Any]) -> bytes:
    body = marshal.dumps(settings)
    return LENGTH.pack(len(body)) + body


def _receive(grader: socket.socket, size: int) -> bytes:
    """Raises EOFError when the other end closes."""
    received = b""
    while len(received) < size:
        piece = grader.recv(size - len(received))
        if not piece:
            raise EOFError
        received += piece
    return received


def main() -> None:
    """Reads the settings, enters the sandbox, serves until the grader closes its socket."""
    grader = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    (size,) = LENGTH.unpack(_receive(grader, LENGTH.size))
    settings = marshal.loads(_receive(grader, size))
    for name in PRELOADED:
        __import__(name)
    if settings["level"] == "namespaces":
        isolation.unshare_namespaces()
    if settings["level"] != "bubblewrap":
        # A child goes on, in new namespaces as their process 1; this process only waits for it. At level rlimits the
        # child outlives this one if that is killed as the orphan of a killed grader: then it has files to remove.
        child = os.fork()
        if child:
            grader.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    if settings["level"] == "namespaces":
        isolation.die_with_parent()
        interpreter = settings["interpreter"]
        isolation.build_root(
            settings["disk_bytes"], isolation.program_paths(interpreter) if interpreter else ()
        )
    isolation.hide_memory()
    if settings["level"] == "rlimits" and os.geteuid() == 0:
        os.chown(settings["directory"], settings["user"], settings["user"])
    supervisor = Supervisor(settings, grader)
    try:
        grader.sendall(READY)
        supervisor.serve()
    finally:
        supervisor.end_all()
        if settings["level"] == "rlimits":
            empty(settings["directory"])
            os.rmdir(settings["directory"])


def empty(directory: str) -> None:
    """Removes all that is in a directory, however deep it is nested: subdirectories are first moved to the top."""
    queue = [directory]
    moved = 0
    while queue:
        place = queue.pop()
        with os.scandir(place) as entries:
            found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_directory in found:
            if not is_directory:
                os.unlink(path)
                continue
            target = f"{directory}/removed-{moved}-{os.getpid()}"
            moved += 1
            os.chmod(path, 0o700)
            os.rename(path, target)
            queue.append(target)
        if place != directory:
            os.rmdir(place)


def is_empty(directory: str) -> bool:
    """Whether a directory holds nothing. No name of what it holds stays in memory."""
    entries = ctypes.create_string_buffer(4096)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    size = isolation.libc.syscall(GET_ENTRIES[os.uname().machine], fd, entries, len(entries))
    os.close(fd)
    ctypes.memset(entries, 0, len(entries))
    return int(size) == NO_ENTRIES


class Supervisor:
    """Runs one test at a time. As process 1 of its own process-number namespace it can end all others in it."""

    def __init__(self, settings: dict[str, Any], grader: socket.socket) -> None:
        self.settings, self.grader = settings, grader
        self.first = os.getpid() == 1
        self.woken, wake = os.pipe()
        for fd in (self.woken, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.mode = os.stat(settings["directory"]).st_mode & 0o7777
        self.libraries: list[int] = []
        if settings["level"] == "rlimits" and os.geteuid() == 0:
            self.libraries = [os.open(path, os.O_PATH) for path in sys.path if os.path.isdir(path)]

    def serve(self) -> None:
        """Runs tests until the grader closes its socket."""
        while True:
            said, given, _, _ = socket.recv_fds(self.grader, 1, DESCRIPTORS)
            if not said:
                return
            if said == START:  # else END, of a test that had ended by itself
                self._run(given)
                self._tidy()

    def _run(self, given: list[int]) -> None:
        reason, code, cpu = 0, 0, 0.0
        started: list[int] = []
        try:
            started = self._fork_both(given) if len(given) == DESCRIPTORS else [self._fork("run", given)]
        except OSError as error:
            reason = error.errno or -1
        for fd in given:
            os.close(fd)
        try:
            if started:
                code, cpu = self._until_end(started[0])
        finally:
            for pid in started[1:]:
                os.kill(pid, signal.SIGKILL)
        self.end_all()
        self.grader.sendall(REPLY.pack(reason, code, cpu))

    def _fork(self, task: str, *arguments: Any) -> int:
        pid = os.fork()
        if pid == 0:
            getattr(Tested(self.settings, self.libraries), task)(*arguments)
        return pid

    def _fork_both(self, given: list[int]) -> list[int]:
        """The tests' process, which decides, and the answer's, forked before anybody here has read the tests."""
        theirs, ours = socket.socketpair()
        with theirs, ours:
            answer = self._fork("answer", given[:5], theirs.fileno())
            try:
                return [self._fork("check", given, ours.fileno()), answer]
            except OSError:
                os.kill(answer, signal.SIGKILL)
                raise

    def _until_end(self, pid: int) -> tuple[int, float]:
        """Exit code and CPU seconds of a test that ends by itself, or is ended because the grader says so.

        Raises:
            EOFError: the grader is gone.
        """
        poll = select.poll()
        for fd in (self.woken, self.grader.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            for fd, _ in poll.poll():
                if fd == self.woken:
                    os.read(fd, 4096)
                    continue
                said = self.grader.recv(1)
                os.kill(pid, signal.SIGKILL)
                if not said:
                    raise EOFError("the grader is gone")

    def _tidy(self) -> None:
        """Empties the private directory, in a process of its own: how a program named its files is not kept here."""
        directory = self.settings["directory"]
        os.chmod(directory, self.mode)
        if is_empty(directory):
            return
        cleaner = os.fork()
        if cleaner == 0:
            try:
                empty(directory)
                os._exit(0)
            finally:
                os._exit(1)
        os.waitpid(cleaner, 0)

    def end_all(self) -> None:
        """Kills every other process in the sandbox and waits for their end.

        Raises:
            TimeoutError: some are still there after `KILL_SECONDS`.
        """
        deadline = time.monotonic() + KILL_SECONDS
        while True:
            if self.first:
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
