"""Queries of child processes, which may end between two calls."""

import os
import time
from contextlib import suppress

import psutil


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for_exit(pid: int) -> None:
    deadline = time.monotonic() + 300.0
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there after 300 s"
        time.sleep(0.02)


def engine_pids(parent: int | None = None) -> list[int]:
    """Returns the process ids of the engine actors below `parent`, by default this process."""
    return actor_pids(parent or os.getpid(), "EngineActor")


def actor_pids(parent: int, kind: str) -> list[int]:
    """Returns the process ids of the Ray actors of class `kind` below `parent`."""
    return [process.pid for process in process_tree(parent) if kind in _name(process)]


def process_tree(pid: int) -> list[psutil.Process]:
    """Returns a process and all of its descendants; an empty list for an ended process."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def child_command_lines() -> list[str]:
    """Returns the command lines of all live processes below this one."""
    lines = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # also raised for a zombie
            lines.append(" ".join(child.cmdline()))
    return lines


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
