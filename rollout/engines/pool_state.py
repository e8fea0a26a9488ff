"""What the pool knows of its engines, how it treats them, and how it fails."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from config.errors import RunError
from rollout.engines.ray_runtime import EnginePlace

_STACKS_S = 5.0


class EngineLost(RunError):
    """An engine failed for good; the text says which, where, and what its own traceback was."""


@dataclass(frozen=True)
class PoolSettings:
    """How the pool treats its engines.

    window: completions that one engine holds at a time; further groups wait in the pool, so that whichever
        engine is free first takes them.
    max_attempts: engines that may be lost one after the other at one place, or with one group.
    address: of a Ray cluster; None starts a local runtime.
    """

    start_timeout_s: float = 600.0
    request_timeout_s: float = 900.0
    window: int = 512
    max_attempts: int = 3
    num_cpus_per_engine: int = 1
    address: str | None = None


@dataclass(eq=False)
class Slot:
    """One place and the actor that holds it now. `number` never recurs.

    replaces_lost: it has not served yet, in the place of an engine that was lost. reported: and is overdue.
    """

    number: int
    place: EnginePlace
    host: Any
    pending: Any
    state: Literal["starting", "waiting for weights", "loading", "live"] = "starting"
    since: float = field(default_factory=time.monotonic)
    pid: int = 0
    polling: Any = None
    submitting: list[Any] = field(default_factory=list)
    steps: int = 0
    losses: int = 0
    replaces_lost: bool = False
    reported: bool = False
    received: frozenset[str] = frozenset()

    @property
    def references(self) -> list[Any]:
        return [ref for ref in (self.pending, self.polling, *self.submitting) if ref is not None]


def stacks_of(slots: Sequence[Slot]) -> str:
    """What every thread of every engine is doing now."""
    import ray

    calls = {slot.host.stacks.options(concurrency_group="watch").remote(): slot for slot in slots}
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_STACKS_S)
    parts = []
    for ref, slot in calls.items():
        text = f"no answer within {_STACKS_S:.0f} s (pid {slot.pid})"
        if ref in ready:
            try:
                text = ray.get(ref)
            except Exception as error:  # of whatever kind: this is told beside another error
                text = str(error).splitlines()[0]
        parts.append(f"--- {slot.place}, {slot.state}\n{text}")
    return "\n".join(parts)
