"""Waiting for calls of Ray actors, and what a process is doing while somebody waits for it."""

import faulthandler
import tempfile
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, UnserializableException

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


RAISED = (RayTaskError, UnserializableException)
"""What `ray.get` raises where the call of an actor raised; the second where pickle does not restore its exception."""


def cause_of(error: Exception) -> str:
    """The exception that a process of Ray raised, or why it ended, in one line."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return described(error.cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if isinstance(error, RAISED) or raised_in_construction(error) else lines[0]


def raised_in_construction(error: Exception) -> bool:
    """Whether an actor's constructor raised: the last line of Ray's text has it."""
    return isinstance(error, RayActorError) and "creation task" in str(error)


def described(error: BaseException) -> str:
    """Type and message of an exception, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def own_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode()
