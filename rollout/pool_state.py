"""What the pool knows of its engines, how it treats them, and how it fails."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.ray_runtime import EnginePlace


class EngineLost(RuntimeError):
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
    """One place and the actor that holds it now. `number` never recurs."""

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
    received: frozenset[str] = frozenset()

    @property
    def references(self) -> list[Any]:
        return [ref for ref in (self.pending, self.polling, *self.submitting) if ref is not None]
