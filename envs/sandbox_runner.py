"""The sandbox's inside: a supervisor that forks one process per test (`envs.sandbox_program`).

Started by `envs.sandbox_session` as a bare interpreter (no site-packages, empty environment), with a socket to the
grader as standard input. A test's source, its input and what it prints pass between the grader and the test's
process by files and pipes that the supervisor hands on and never reads. So a fork of the supervisor inherits no
byte of what was judged before it. It ends when the socket closes, and with it ends everything that it started.

The grader sends the settings (marshal of a dict), then for each test `JOB` with five file descriptors: marshal of
the job, standard input, and the pipes for output, errors and value; `STOP` ends a test that printed too much. The
supervisor answers `READY`, then `ANSWER` for each test. Each message is one packet.
"""

import contextlib
import marshal
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

from envs import sandbox_isolation
from envs.sandbox_program import READY, Settings, Tested

JOB = struct.Struct("<d")  # seconds by the clock
STOP = b"S"
ANSWER = struct.Struct("<Bidd")  # status, exit code, CPU seconds, wall seconds
FILES_PER_JOB = 5
PACKET_BYTES = 1 << 16
STATUS = ("finished", "time", "output", "disk", "broken")
FINISHED, TIME, OUTPUT, DISK, BROKEN = range(5)
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


def main() -> None:
    """Reads the settings, enters the sandbox, serves until the grader's socket closes."""
    grader = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    settings = marshal.loads(grader.recv(PACKET_BYTES))
    for name in PRELOADED:
        __import__(name)
    if settings["level"] != "bubblewrap":
        _become_child(settings["level"] == "namespaces", grader)
    if settings["level"] == "namespaces":
        sandbox_isolation.die_with_parent()
        sandbox_isolation.build_root(settings["disk_bytes"])
    sandbox_isolation.hide_memory()
    if settings["level"] == "rlimits" and os.geteuid() == 0:
        os.chown(settings["directory"], settings["user"], settings["user"])
    supervisor = Supervisor(settings, grader)
    grader.send(READY)
    try:
        supervisor.serve()
    finally:
        supervisor.end_all()
        if settings["level"] == "rlimits":
            empty(settings["directory"])
            os.rmdir(settings["directory"])


def _become_child(in_namespaces: bool, grader: socket.socket) -> None:
    """Returns in a child; this process only waits for it. In new namespaces, the child is their process 1.

    At level rlimits the child outlives this process if that is killed as the orphan of a killed grader: then it
    still has files to remove.
    """
    if in_namespaces:
        sandbox_isolation.unshare_namespaces()
    child = os.fork()
    if child:
        grader.close()
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

    def __init__(self, settings: Settings, grader: socket.socket) -> None:
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
        while True:
            request, files, _, _ = socket.recv_fds(self.grader, PACKET_BYTES, FILES_PER_JOB)
            if not request:
                return
            if request != STOP:  # which may come when the test has already ended
                (wall_seconds,) = JOB.unpack(request)
                self.grader.send(self._run(wall_seconds, files))
                if apart(self._tidy):
                    raise OSError("the directory of a test could not be emptied")

    def _tidy(self) -> bool:
        directory = self.settings["directory"]
        os.chmod(directory, self.mode)
        empty(directory)
        return False

    def _run(self, wall_seconds: float, files: list[int]) -> bytes:
        began = time.monotonic()
        try:
            pid = os.fork()
            if pid == 0:
                Tested(self.settings, self.libraries).run(files)
        except OSError as error:
            os.write(files[3], f"fork: {error}".encode())
            return ANSWER.pack(BROKEN, 0, 0.0, 0.0)
        finally:
            for fd in files:
                os.close(fd)
        watch = Watch(self, pid, began + wall_seconds)
        status = watch.until_end()
        self.end_all()
        used_up = watch.cpu >= self.settings["cpu_seconds"] - CPU_SLACK_SECONDS
        if status == FINISHED and watch.code < 0 and used_up:
            status = TIME
        return ANSWER.pack(status, watch.code, watch.cpu, time.monotonic() - began)

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
    """Waits until a test ends, or has to be ended."""

    def __init__(self, supervisor: Supervisor, pid: int, deadline: float) -> None:
        self.supervisor, self.pid, self.deadline = supervisor, pid, deadline
        self.settings = supervisor.settings
        self.code, self.cpu = 0, 0.0

    def until_end(self) -> int:
        """The status; afterwards the test's process is no more."""
        poll = select.poll()
        grader, woken = self.supervisor.grader, self.supervisor.woken
        poll.register(grader, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while not self._ended(os.WNOHANG):
            left = self.deadline - time.monotonic()
            if left <= 0:
                return self._end(TIME)
            patience = min(left, DISK_CHECK_SECONDS) if self.settings["watch_disk"] else left
            ready = [fd for fd, _ in poll.poll(1000 * patience)]
            if woken in ready:
                os.read(woken, 4096)
            if grader.fileno() in ready:
                if not grader.recv(PACKET_BYTES):
                    self._end(TIME)
                    raise EOFError("the grader is gone")
                return self._end(OUTPUT)
            if not ready and self.settings["watch_disk"] and apart(self._disk_is_full):
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


def apart(look: Callable[[], bool]) -> bool:
    """What `look` returns, or True if it fails, found out in a process of its own.

    For whatever reads names of files: a program chose them, and the supervisor must not hold them.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    found = True
    try:
        found = look()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(found)
