"""Processes as tests see them: any may end between being listed and being asked."""

import os
import time
from contextlib import suppress

import psutil


def alive(pid: int) -> bool:
    """Whether the process exists and is more than an entry that waits for its parent."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 300.0
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there after 300 s"
        time.sleep(0.02)


def engine_processes(parent: int | None = None) -> list[int]:
    """Process ids of the Ray actors that hold an engine and that `parent`, or this process, has started."""
    return actors_under(parent or os.getpid(), "EngineActor")


def actors_under(parent: int, kind: str) -> list[int]:
    """Process ids of the Ray actors of the class `kind` that `parent` has started."""
    return [process.pid for process in family(parent) if kind in _name(process)]


def family(pid: int) -> list[psutil.Process]:
    """The process and all below it; none where it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def command_lines() -> list[str]:
    """Of the processes below this one; those that have ended have none."""
    lines = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            lines.append(" ".join(child.cmdline()))
    return lines


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
