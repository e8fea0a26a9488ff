"""Waiting for calls of Ray actors, and what a process is doing while somebody waits for it."""

import faulthandler
import tempfile
from collections.abc import Collection
from typing import Any

import ray

Reference = Any
"""Of Ray, to what a call of an actor will bring."""


def wait_for_any(references: Collection[Reference], timeout: float) -> list[Reference]:
    """Wait until one of them has an outcome, at most `timeout` seconds; all that have one by then."""
    ray.wait(list(references), timeout=timeout)
    return wait_for_all(references, timeout=0)


def wait_for_all(references: Collection[Reference], timeout: float) -> list[Reference]:
    """Wait until all of them have an outcome, at most `timeout` seconds; those that have one by then."""
    calls = list(references)
    return list(ray.wait(calls, num_returns=len(calls), timeout=timeout)[0]) if calls else []


def own_stacks() -> str:
    """What every thread of this process is doing now."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode()
