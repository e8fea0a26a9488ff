"""The supervisor of the engines of a pool: starts, calls, watches and replaces them when one is lost.

    starting ──▶ loading ──▶ live ──engine lost──▶ its groups are queued anew; another engine starts in its place
             the last push                         and loads the last push by itself

An engine may be lost at any moment, in a push as in a step: the others go on, and the new one joins them when it has
loaded. Every wait has a deadline, and the stacks of all engines are shown when it passes. One thread uses it;
a transfer's own thread may call the engines while that one waits for it.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from config.schema.errors import ConfigError
from torchgrpo.cluster.calls import RAISED, Reference, cause_of, wait_for_all, wait_for_any
from torchgrpo.cluster.runtime import Place, free_resources, start_actor, start_ray
from torchgrpo.rollout.engines.dispatch import Dispatch
from torchgrpo.rollout.engines.engine_actor import CONCURRENCY_GROUPS, EngineActor, WeightHandle
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.engines.remote_calls import (
    CallBroken,
    EngineLost,
    Member,
    RemoteEngines,
    call_broken,
    stacks_of,
)

log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class HostLost(Exception):
    """The actor of an engine died before it answered; another one starts in its place."""


@dataclass(frozen=True)
class PoolSettings:
    """How a pool treats its engines.

    window: completions that one engine holds at a time (`Dispatch`).
    max_attempts: engines that may be lost one after the other at one place, or with one group.
    address: of a Ray cluster; None starts a local runtime, with `ray_cpus` cores where others need some of it too.
    """

    start_timeout_s: float = 600.0
    request_timeout_s: float = 900.0
    window: int = 512
    max_attempts: int = 3
    num_cpus_per_engine: int = 1
    ray_cpus: int = 0
    address: str | None = None


@dataclass(eq=False)
class Slot:
    """One place and the engine that is there now, a `EngineActor` in an actor of its own.

    number: never recurs. pending: its start or its load. lost_in_a_row: engines at this place since one finished a
    group. replaces_lost: it has not served yet, in the place of an engine that was lost. overdue: and that was told.
    end: why it was lost.
    """

    number: int
    place: Place
    actor: Any
    pending: Reference
    state: Literal["starting", "loading", "live"] = "starting"
    since: float = field(default_factory=time.monotonic)
    pid: int = 0
    polling: Reference = None
    submitting: list[Reference] = field(default_factory=list)
    steps: int = 0
    end: str = ""
    lost_in_a_row: int = 0
    replaces_lost: bool = False
    overdue: bool = False

    @cached_property
    def name(self) -> str:
        return str(self.place)

    @property
    def member(self) -> Member:
        return Member(self.pid, f"{self.place}, {self.state}", self.actor)

    @property
    def references(self) -> list[Reference]:
        return [ref for ref in (self.pending, self.polling, *self.submitting) if ref is not None]


class Supervisor:
    """All engines of a pool.

    Args:
        factory: builds one engine inside its actor; must be picklable.
        places: one engine each.

    groups: what is on which engine; the groups of a lost one go back to it.

    Raises:
        ConfigError, EngineLost: an engine does not start; everything already started is taken down.
    """

    def __init__(
        self, factory: Callable[[], Engine], places: Sequence[Place], settings: PoolSettings
    ) -> None:
        self.settings = settings
        self.groups = Dispatch(settings.window)
        self.version = 0
        self.slots: list[Slot] = []
        self._factory = factory
        self._numbers = itertools.count()
        self._last_push: WeightHandle | None = None
        self._closing = False
        own_cpus = len(places) * settings.num_cpus_per_engine
        self._owns_ray = start_ray(settings.address, max(settings.ray_cpus, own_cpus))
        try:
            self.slots = [self._new_slot(place) for place in places]
            self._await_state("starting", settings.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closing = True
        if self.slots and ray.is_initialized():
            for end in ("close", "__ray_terminate__"):  # the engine, then its process, so that it cleans up
                wait_for_all([getattr(slot.actor, end).remote() for slot in self.live], _CLOSE_S)
            for slot in self.slots:
                ray.kill(slot.actor)
        self.slots = []
        self.groups.clear()
        self._last_push = None
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    # --- who is there --------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state == "live"]

    @property
    def members(self) -> tuple[int, ...]:
        """Process ids of the live engines; they change whenever one is replaced."""
        return tuple(slot.pid for slot in self.live)

    def elsewhere(self) -> RemoteEngines:
        """The live engines, for another process to call."""
        live = tuple(slot.member for slot in self.wait_for_some())
        return RemoteEngines(live, self.settings.request_timeout_s)

    def wait_for_some(self) -> list[Slot]:
        """The live engines; others may still be starting in the place of lost ones, if not all are."""
        self.wait_for_loads()
        return self.live or self.wait_for_every()

    def wait_for_every(self) -> list[Slot]:
        """Every engine, once all have started and loaded."""
        self._await_state("starting", self.settings.start_timeout_s)
        self.wait_for_loads()
        return self.live

    def wait_for_loads(self) -> None:
        """Wait until nobody reads the last push."""
        self._await_state("loading", self.settings.start_timeout_s)

    # --- calls ---------------------------------------------------------------------------------------------

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers of every live engine to a method. Raises CallBroken when one was lost."""
        live = self.wait_for_some()
        pairs = zip(live, arguments, strict=True)
        answered = self.results({slot.actor.call.remote(method, own): slot for slot, own in pairs}, method)
        lost = {str(slot.place): slot.end for slot in live if slot not in answered}
        if lost:
            raise CallBroken(call_broken(lost, method))
        return list(answered.values())

    def results(self, calls: dict[Reference, Slot], what: str) -> dict[Slot, Any]:
        """What the engines answered; one that died, or is late, is replaced and missing here."""
        limit = self.settings.request_timeout_s
        there = wait_for_all(calls, limit)
        if len(there) < len(calls):
            log.error("stacks of all engines:\n%s", self.stacks())
        answered = {}
        for ref, slot in calls.items():
            if ref not in there:
                self.engine_lost(slot, f"the pool waited {limit:.0f} s for {what} of it (pid {slot.pid})")
                continue
            with suppress(HostLost):
                answered[slot] = self.result_of(slot, ref)
        return answered

    def result_of(self, slot: Slot, ref: Reference) -> Any:
        """The result of a call. Raises HostLost, or EngineLost or ConfigError for the engine's error."""
        try:
            return ray.get(ref)
        except (RayActorError, ObjectLostError) as error:  # an answer lies where it was made until fetched
            self.engine_lost(slot, cause_of(error))
            raise HostLost from None
        except RAISED as error:
            # The remote traceback first, then which engine it was; of a user's error its message alone.
            if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
                raise ConfigError(f"{error.cause}\n({slot.place}, while {slot.state})") from None
            failed = f"{error}\n{slot.place} failed while {slot.state}: {cause_of(error)}"
            raise EngineLost(failed) from None

    # --- the life of an engine -----------------------------------------------------------------------------

    def _new_slot(self, place: Place) -> Slot:
        actor = start_actor(EngineActor, place, self.settings.num_cpus_per_engine, CONCURRENCY_GROUPS)
        return Slot(next(self._numbers), place, actor, actor.start.remote(self._factory))

    def publish(self, handle: WeightHandle, version: int, served: Collection[Slot] = ()) -> None:
        """From now on every engine has these weights before it serves; returns when all live ones do.

        served: engines that have them already.
        """
        self._last_push, self.version = handle, version
        for slot in self.live:
            if slot not in served:
                self._begin_load(slot)
        self._await_state("loading", self.settings.start_timeout_s + self.settings.request_timeout_s)

    def arrived(self, slot: Slot, value: Any) -> None:
        """A start (value: process id) or a load is done."""
        slot.pending = None
        if slot.state == "starting":
            slot.pid = value
            if self._last_push is not None:
                self._begin_load(slot)
                return
        if slot.replaces_lost:
            slot.replaces_lost = False
            log.warning("%s is back, with policy version %d (pid %d)", slot.place, self.version, slot.pid)
        slot.state = "live"
        self.groups.open(slot.number)

    def _begin_load(self, slot: Slot) -> None:
        assert self._last_push is not None
        slot.state, slot.since = "loading", time.monotonic()
        slot.pending = slot.actor.load.remote(self._last_push, self.version)

    def engine_lost(self, slot: Slot, why: str) -> None:
        """Queue the slot's groups anew and start another engine in its place.

        Raises:
            EngineLost: too many in a row. Also while the pool is being closed: a push that failed may have left a
                thread behind, whose calls end with the actors, and nothing may start beside or after the end.
        """
        if self._closing:
            raise EngineLost(f"{slot.place} ended with its pool: {why}")
        groups = self.groups.engine_lost(slot.number)
        log.warning("%s is lost with %d groups in flight: %s", slot.place, len(groups), why)
        ray.kill(slot.actor)
        slot.end = why
        slot.pending, slot.polling, slot.submitting = None, None, []
        in_a_row = slot.lost_in_a_row + 1
        losses = [in_a_row, *(self.groups.times_lost[group.request_id] for group in groups)]
        if max(losses) >= self.settings.max_attempts:
            raise EngineLost(
                f"{slot.place} was lost {in_a_row} times in a row, the last time with {len(groups)} groups in "
                f"flight: {why}"
            )
        fresh = self._new_slot(slot.place)
        fresh.lost_in_a_row, fresh.replaces_lost = in_a_row, True
        self.slots[self.slots.index(slot)] = fresh

    # --- deadlines -----------------------------------------------------------------------------------------

    def _await_state(self, state: str, limit: float) -> None:
        """Wait until no slot is in `state`; responses that come meanwhile are kept by the actors."""
        deadline = time.monotonic() + limit
        while late := [slot for slot in self.slots if slot.state == state]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                names = ", ".join(str(slot.place) for slot in late)
                raise EngineLost(
                    f"{self.stacks()}\nthe pool waited {limit:.0f} s for {names}, still {state} "
                    f"(inference_model.start_timeout_s); where, the stacks above say; {free_resources()}"
                )
            owners = {slot.pending: slot for slot in late}
            for ref in wait_for_any(owners, min(remaining, 1.0)):
                with suppress(HostLost):
                    self.arrived(owners[ref], self.result_of(owners[ref], ref))

    def check_deadlines(self) -> None:
        """An engine that holds a group beyond its time counts as hung."""
        now, limit = time.monotonic(), self.settings.request_timeout_s
        while (longest := self.groups.longest()) is not None and now - longest.since > limit:
            slot = next(slot for slot in self.slots if slot.number == longest.engine)
            log.error("stacks of all engines:\n%s", self.stacks())
            self.engine_lost(
                slot,
                f"group {longest.request.request_id} of the {len(self.groups.held(slot.number))} there waited "
                f"{limit:.0f} s for it; it made {slot.steps} steps since its start (pid {slot.pid}); if it is only "
                "slow, raise inference_model.request_timeout_s",
            )
        # An engine that does not come back is told of once; when none does, that is the end.
        absent = [slot for slot in self.slots if slot.state != "live"]
        late = [slot for slot in absent if now - slot.since > self.settings.start_timeout_s]
        if len(late) == len(self.slots):
            raise EngineLost(self._missing(late))
        for slot in late:
            if not slot.overdue:
                slot.overdue = True
                log.error("%s; the other engines go on", self._missing([slot]))

    def _missing(self, late: list[Slot]) -> str:
        names = ", ".join(f"{slot.place}, still {slot.state}" for slot in late)
        limit = self.settings.start_timeout_s
        return (
            f"{self.stacks()}\nthe pool waited {limit:.0f} s for {names}, to take the place of a lost engine "
            f"(inference_model.start_timeout_s); {free_resources()}"
        )

    def stacks(self) -> str:
        """What every thread of every engine is doing now."""
        return stacks_of([slot.member for slot in self.slots])
