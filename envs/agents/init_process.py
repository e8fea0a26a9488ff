"""Parent of an agent's process, which ends all of the agent's processes.

    guard ──fork──▶ this process ──fork──▶ agent ──▶ its processes
          ◀─status─ exit code or fault

In a namespace this process is process 1: the kernel kills all others when it ends. Elsewhere it is a subreaper, which
kills its descendants. It ends when the agent ends, or when the guard ends.
"""

import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import psutil

from envs.agents.agent_process import AgentCall
from envs.sandbox import isolation

STATUS = struct.Struct("<Bi")
"""Kind of the end, and the exit code, which is negative for a signal."""
EXITED, TOO_MANY = 0, 1
MAX_PROCESSES = 256
MAX_THREADS = 8192
"""Largest number of threads of all processes together."""
CHECK_SECONDS, SCAN_SECONDS = 0.1, 0.5
"""Intervals of counting processes: of the own namespace, and among all processes of the machine."""
PR_SET_CHILD_SUBREAPER = 36


class StopRequest(BaseException):
    """Signal to end the agent."""


def raise_stop(number: int, frame: FrameType | None) -> None:
    """Raises StopRequest, as the handler of a signal."""
    raise StopRequest


def set_process_option(option: int, value: int) -> None:
    """Calls prctl, on Linux."""
    if sys.platform == "linux":
        isolation.libc.prctl(option, value, 0, 0, 0)


def run_init(call: AgentCall, status: int, in_namespace: bool) -> NoReturn:
    """Runs the agent until it ends, and then ends all processes.

    status: descriptor for the end of the agent.
    """
    try:
        if in_namespace:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # process 1 then ignores it
            set_process_option(isolation.PR_SET_PDEATHSIG, signal.SIGKILL)
            isolation.hide_other_processes()
            isolation.drop_host_capabilities()
        else:
            signal.signal(signal.SIGTERM, raise_stop)
            set_process_option(PR_SET_CHILD_SUBREAPER, 1)
            set_process_option(isolation.PR_SET_PDEATHSIG, signal.SIGTERM)
        kind, code = _watch(call, status, in_namespace)
        os.write(status, STATUS.pack(kind, code))
    except (StopRequest, BrokenPipeError):
        pass  # the guard ends, and nobody reads the status
    finally:
        if not in_namespace:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            kill_descendants()
        os._exit(0)


def _watch(call: AgentCall, status: int, in_namespace: bool) -> tuple[int, int]:
    """Forks the agent, and waits for its end; returns kind and code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler during a fork cannot raise
    agent = os.fork()
    if agent == 0:
        try:
            set_process_option(isolation.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(status)
            call.run()
        finally:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for descriptor in (call.output, call.errors, call.report):
        os.close(descriptor)
    wakeup, wake = os.pipe()
    for descriptor in (wakeup, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(status, 0)  # an error, since the reader has ended, is always reported
    seconds = CHECK_SECONDS if in_namespace else SCAN_SECONDS
    checked_at = time.monotonic()
    while True:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == agent:
                    return EXITED, os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() - checked_at > seconds:
            checked_at = time.monotonic()
            if _has_too_many(in_namespace):
                return TOO_MANY, 0
        for descriptor, _ in poll.poll(1000 * seconds):
            if descriptor == status:
                raise StopRequest
            with suppress(BlockingIOError):
                os.read(wakeup, 4096)


def _has_too_many(in_namespace: bool) -> bool:
    """Whether the agent has more processes or threads than it may have."""
    if not in_namespace:
        return len(psutil.Process().children(recursive=True)) > MAX_PROCESSES
    names = [name for name in os.listdir("/proc") if name.isdigit()]
    threads = 0
    for name in names:
        with suppress(OSError):  # it has ended meanwhile
            threads += os.stat(f"/proc/{name}/task").st_nlink - 2
    return len(names) - 1 > MAX_PROCESSES or threads > MAX_THREADS


def kill_descendants() -> None:
    """Kills all descendants of this process, which is a subreaper, and waits for their end.

    They are stopped first, until none is new, since a process that forks may be faster than the list of processes.
    """
    stopped: set[int] = set()
    while new := [each for each in psutil.Process().children(recursive=True) if each.pid not in stopped]:
        for process in new:
            stopped.add(process.pid)
            with suppress(psutil.Error):
                process.suspend()
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
