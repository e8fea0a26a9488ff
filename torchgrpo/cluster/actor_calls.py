"""Waits for Ray calls, formats errors in one line, and dumps this process's stacks."""

import faulthandler
import tempfile
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, UnserializableException

CallReference = Any
"""Ray's reference to the future result of an actor call."""


def wait_for_any(references: Collection[CallReference], timeout: float) -> list[CallReference]:
    """Waits up to `timeout` seconds for the first finished call; returns all finished calls."""
    ray.wait(list(references), timeout=timeout)
    return wait_for_all(references, timeout=0)


def wait_for_all(references: Collection[CallReference], timeout: float) -> list[CallReference]:
    """Waits up to `timeout` seconds until all calls are finished; returns the finished calls."""
    calls = list(references)
    return list(ray.wait(calls, num_returns=len(calls), timeout=timeout)[0]) if calls else []


CALL_ERRORS = (RayTaskError, UnserializableException)
"""Exceptions of `ray.get` for a call that raised; the second if pickle cannot restore the exception."""


def failure_cause(error: Exception) -> str:
    """Returns the exception of a Ray process, or its cause of death, in one line."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return describe_error(error.cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if isinstance(error, CALL_ERRORS) or is_constructor_error(error) else lines[0]


def is_constructor_error(error: Exception) -> bool:
    """Whether an actor's constructor raised. The last line of Ray's message has the exception."""
    return isinstance(error, RayActorError) and "creation task" in str(error)


def describe_error(error: BaseException) -> str:
    """Returns type and message of an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def dump_own_stacks() -> str:
    """Returns the Python stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode()
