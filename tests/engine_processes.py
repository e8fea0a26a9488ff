"""The processes of Ray actors that hold an engine."""

import os

import psutil


def engine_processes(parent: int | None = None) -> list[int]:
    """Process ids of the engines that `parent`, or this process, has started."""
    children = psutil.Process(parent or os.getpid()).children(recursive=True)
    return [child.pid for child in children if "EngineHost" in child.name()]
