"""The sandbox's inside: a supervisor that forks one process per test (`envs.sandbox_program`).

Started by `envs.sandbox` as a bare interpreter (no site-packages, empty environment). Requests come on standard
input, answers leave on standard output. The supervisor never runs a line of the tested program and is never told
what a test expects, so a fork of it holds nothing worth stealing. It ends when its standard input closes, and
with it ends everything that it started.

Request: length (u32), then marshal of a dict (settings first, then jobs). Answer: `ANSWER`, then the three texts.
"""

import contextlib
import fcntl
import marshal
import os
import select
import signal
import struct
import sys
import time
from typing import Any

from envs import sandbox_isolation
from envs.sandbox_program import READY, Tested, write_all

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct(
    "<BiddIII"
)  # status, exit code, CPU seconds, wall seconds, bytes of out, err and value
STATUS = ("finished", "time", "output", "disk", "broken")
FINISHED, TIME, OUTPUT, DISK, BROKEN = range(5)
ERROR_BYTES = 8192
DISK_CHECK_SECONDS = 0.1
LONGEST_PATH = 1000
"""Characters; whoever nests more deeply wants to hide something."""
KILL_SECONDS = 10.0
CPU_SLACK_SECONDS = 0.1
PRELOADED = (
    "bisect",
    "collections",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "random",
    "re",
    "typing",
)
"""What most programs import: loaded once here, it costs a test nothing."""


def read_exactly(fd: int, size: int) -> bytes:
    """Raises EOFError when the other end closes."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def pack_request(request: dict[str, Any]) -> bytes:
    body = marshal.dumps(request)
    return LENGTH.pack(len(body)) + body


def _receive(fd: int) -> dict[str, Any]:
    (size,) = LENGTH.unpack(read_exactly(fd, LENGTH.size))
    return marshal.loads(read_exactly(fd, size))


def pack_answer(status: int, code: int, cpu: float, wall: float, texts: tuple[bytes, bytes, bytes]) -> bytes:
    return ANSWER.pack(status, code, cpu, wall, *map(len, texts)) + b"".join(texts)


def main() -> None:
    """Reads the settings, enters the sandbox, serves until standard input closes."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    settings = _receive(requests)
    for name in PRELOADED:
        __import__(name)
    if settings["level"] != "bubblewrap":
        _become_child(settings["level"] == "namespaces", requests, answers)
    if settings["level"] == "namespaces":
        sandbox_isolation.die_with_parent()
        sandbox_isolation.build_root(settings["disk_bytes"])
    sandbox_isolation.hide_memory()
    if settings["level"] == "rlimits" and os.geteuid() == 0:
        os.chown(settings["directory"], settings["user"], settings["user"])
    supervisor = Supervisor(settings, requests, answers)
    write_all(answers, READY)
    try:
        supervisor.serve()
    finally:
        supervisor.end_all()
        if settings["level"] == "rlimits":
            empty(settings["directory"])
            os.rmdir(settings["directory"])


def _become_child(in_namespaces: bool, requests: int, answers: int) -> None:
    """Returns in a child; this process only waits for it. In new namespaces, the child is their process 1.

    At level rlimits the child outlives this process if that is killed as the orphan of a killed grader: then it
    still has files to remove.
    """
    if in_namespaces:
        sandbox_isolation.unshare_namespaces()
    child = os.fork()
    if child:
        os.close(requests)
        os.close(answers)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


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


class Supervisor:
    """Runs one job at a time. As process 1 of its own process-number namespace it can end all others in it."""

    def __init__(self, settings: dict[str, Any], requests: int, answers: int) -> None:
        self.settings, self.requests, self.answers = settings, requests, answers
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
        while True:
            try:
                job = _receive(self.requests)
            except EOFError:
                return
            write_all(self.answers, self._run(job))
            self._tidy()

    def _tidy(self) -> None:
        directory = self.settings["directory"]
        os.chmod(directory, self.mode)
        if os.listdir(directory):
            empty(directory)

    def _run(self, job: dict[str, Any]) -> bytes:
        began = time.monotonic()
        ours, theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
        stdin = _sealed(job["stdin"])
        try:
            pid = os.fork()
        except OSError as error:
            return pack_answer(BROKEN, 0, 0.0, 0.0, (b"", f"fork: {error}".encode(), b""))
        if pid == 0:
            Tested(self.settings, self.libraries).run(job, stdin, theirs)
        for fd in (stdin, *theirs):
            os.close(fd)
        watch = Watch(self, pid, ours, began + job["wall_seconds"])
        status = watch.until_end()
        self.end_all()
        watch.drain()
        for fd in ours:
            os.close(fd)
        wall = time.monotonic() - began
        out, err, value = (bytes(text) for text in watch.texts)
        if status == FINISHED and not value.startswith(READY):
            status = BROKEN
        if (
            status == FINISHED
            and watch.code < 0
            and watch.cpu >= self.settings["cpu_seconds"] - CPU_SLACK_SECONDS
        ):
            status = TIME
        return pack_answer(status, watch.code, watch.cpu, wall, (out, err, value[1:]))

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


class Watch:
    """Collects what a test prints until it ends, or has to be ended."""

    def __init__(self, supervisor: Supervisor, pid: int, fds: tuple[int, ...], deadline: float) -> None:
        self.supervisor, self.pid = supervisor, pid
        self.settings = supervisor.settings
        self.deadline = deadline
        self.texts = (bytearray(), bytearray(), bytearray())
        self.limits = (self.settings["output_bytes"], ERROR_BYTES, self.settings["output_bytes"])
        self.open = dict(zip(fds, range(3), strict=True))
        self.overflow = False
        self.code, self.cpu = 0, 0.0
        for fd in fds:
            os.set_blocking(fd, False)

    def until_end(self) -> int:
        """The status; afterwards the test's process is no more."""
        poll = select.poll()
        for fd in (*self.open, self.supervisor.woken, self.supervisor.requests):
            poll.register(fd, select.POLLIN)
        while not self._ended(os.WNOHANG):
            left = self.deadline - time.monotonic()
            if left <= 0:
                return self._end(TIME)
            events = poll.poll(
                1000 * (min(left, DISK_CHECK_SECONDS) if self.settings["watch_disk"] else left)
            )
            for fd, _ in events:
                if fd == self.supervisor.requests:
                    self._end(TIME)
                    raise EOFError("the grader is gone")
                if fd == self.supervisor.woken:
                    os.read(fd, 4096)
                elif fd in self.open and not self._read(fd):
                    poll.unregister(fd)
            if self.overflow:
                return self._end(OUTPUT)
            if self.settings["watch_disk"] and self._disk_is_full():
                return self._end(DISK)
        return FINISHED

    def _ended(self, options: int) -> bool:
        pid, status, usage = os.wait4(self.pid, options)
        if pid == 0:
            return False
        self.code = os.waitstatus_to_exitcode(status)
        self.cpu = usage.ru_utime + usage.ru_stime
        return True

    def _end(self, status: int) -> int:
        os.kill(self.pid, signal.SIGKILL)
        self._ended(0)
        return status

    def _read(self, fd: int) -> bool:
        """False at the end of the stream."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            del self.open[fd]
            return False
        stream = self.open[fd]
        room = self.limits[stream] - len(self.texts[stream])
        self.texts[stream].extend(data[:room])
        self.overflow |= len(data) > room and self.limits[stream] > ERROR_BYTES
        return True

    def drain(self) -> None:
        """What was still in the pipes when the last process of the test ended."""
        for fd in list(self.open):
            while self._read(fd):
                pass

    def _disk_is_full(self) -> bool:
        entries, used = 0, 0
        queue = [self.settings["directory"]]
        while queue:
            try:
                for entry in os.scandir(queue.pop()):
                    entries += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if len(entry.path) > LONGEST_PATH:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError:
                return True  # locked, so that it cannot be seen: no honest program does that
        return entries > sandbox_isolation.DISK_ENTRIES or used > self.settings["disk_bytes"]


def _sealed(data: bytes) -> int:
    """A file in memory that nobody can write to, read from its beginning: a test's standard input."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
