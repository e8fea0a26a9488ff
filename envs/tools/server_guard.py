"""Process between the run and a tool server, which ends all processes of the server.

    python server_guard.py PID_OF_THE_RUN COMMAND ARGS...

The server has the standard streams of this process. When the server ends, when the run ends in any way, or at SIGTERM,
the server and its descendants are killed. Uses the standard library only, so that it starts fast.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class StopRequest(BaseException):
    """Signal to end the server."""


def main() -> None:
    """Runs the server until it ends or must end."""
    run_pid, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _raise_stop)
    code = 1
    try:
        _set_process_option(PR_SET_CHILD_SUBREAPER, 1)  # descendants whose parents end become children
        _set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == run_pid:  # the run has not ended meanwhile
            code = _run_server(command)
    except StopRequest:
        code = 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()
    os._exit(code)


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise StopRequest


def _run_server(command: list[str]) -> int:
    """Starts the server and returns its exit code."""
    server = os.fork()
    if server == 0:
        _become_server(command)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # an end of the server's streams is an end of the last copy
        os.dup2(null, stream)
    while True:
        pid, status = os.wait()
        if pid == server:
            return os.waitstatus_to_exitcode(status) & 0xFF


def _become_server(command: list[str]) -> None:
    """Replaces this process by the server, which is killed if the guard is killed."""
    guard_pid = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if os.getppid() == guard_pid:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _set_process_option(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill_children() -> None:
    """Kills all children until none is left; their children become children of this process."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> Iterator[int]:
    """Yields the process ids of the children, zombies included."""
    own_pid = os.getpid()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == own_pid:
            yield int(name)


if __name__ == "__main__":
    main()
