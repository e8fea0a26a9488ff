"""Starts and calls a pool's engines, makes them load pushes, and replaces lost engines.

    starting ──▶ loading ──▶ live ──engine lost──▶ its groups are queued anew; another engine starts in its slot
             the last push                         and loads the last push by itself

An engine may be lost at any moment, also during a push or a step. The other engines continue, and the new engine joins
them after its load. Every wait has a deadline, after which the stacks of all engines are logged or raised. One thread
uses the supervisor; the thread of a transfer may call the engines while that thread waits for the transfer.
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
from torchgrpo.cluster.actor_calls import CALL_ERRORS, CallReference, failure_cause, wait_for_all, wait_for_any
from torchgrpo.cluster.runtime import DeviceSlot, free_resources, start_actor, start_ray
from torchgrpo.rollout.engines.engine_actor import CONCURRENCY_GROUPS, EngineActor, WeightHandle
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.engines.remote_engines import (
    EngineHandle,
    EngineLost,
    EngineLostInCall,
    RemoteEngines,
    dump_stacks,
    engine_loss_message,
)
from torchgrpo.rollout.engines.request_dispatcher import RequestDispatcher

log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class EngineReplaced(Exception):
    """The actor of an engine died before it answered; another engine starts in its slot."""


@dataclass(frozen=True)
class EnginePoolSettings:
    """Settings of an engine pool: deadlines, window, attempts and Ray resources.

    window: completions that one engine holds at a time (`RequestDispatcher`).
    max_attempts: engines that may be lost in a row in one slot, or with one group, before the run ends.
    address: of a Ray cluster; None starts a local runtime with at least `ray_cpus` cores, for other actors too.
    """

    start_timeout_s: float = 600.0
    request_timeout_s: float = 900.0
    window: int = 512
    max_attempts: int = 3
    num_cpus_per_engine: int = 1
    ray_cpus: int = 0
    address: str | None = None


@dataclass(eq=False)
class EngineSlot:
    """Engine of a pool on its device slot, with its actor and state.

    number: identifies the engine; never recurs. pending_call: the call of its start or load, if any.
    request_calls: calls of `submit` and `cancel` without an answer.
    steps: engine steps since its start. loss_reason: cause of its loss, empty while it lives.
    consecutive_losses: engines lost on this device slot since one of them finished a group.
    is_replacement: the engine replaces a lost one and is not live yet. is_overdue: its delay was logged.
    """

    number: int
    device_slot: DeviceSlot
    actor: Any
    pending_call: CallReference
    state: Literal["starting", "loading", "live"] = "starting"
    state_since: float = field(default_factory=time.monotonic)
    pid: int = 0
    poll_call: CallReference = None
    request_calls: list[CallReference] = field(default_factory=list)
    steps: int = 0
    loss_reason: str = ""
    consecutive_losses: int = 0
    is_replacement: bool = False
    is_overdue: bool = False

    @cached_property
    def name(self) -> str:
        return str(self.device_slot)

    @property
    def handle(self) -> EngineHandle:
        return EngineHandle(self.pid, f"{self.device_slot}, {self.state}", self.actor)

    @property
    def pending_calls(self) -> list[CallReference]:
        return [ref for ref in (self.pending_call, self.poll_call, *self.request_calls) if ref is not None]


class EngineSupervisor:
    """Supervises the engines of a pool.

    Args:
        factory: builds one engine inside its actor; must be picklable.
        device_slots: devices of each engine.

    dispatcher: assigns requests to engines; the requests of a lost engine return to it.

    Raises:
        ConfigError, EngineLost: an engine does not start; engines that started already are ended.
    """

    def __init__(
        self, factory: Callable[[], Engine], device_slots: Sequence[DeviceSlot], settings: EnginePoolSettings
    ) -> None:
        self.settings = settings
        self.dispatcher = RequestDispatcher(settings.window)
        self.version = 0
        self.slots: list[EngineSlot] = []
        self._factory = factory
        self._numbers = itertools.count()
        self._last_push: WeightHandle | None = None
        self._closing = False
        own_cpus = len(device_slots) * settings.num_cpus_per_engine
        self._owns_ray = start_ray(settings.address, max(settings.ray_cpus, own_cpus))
        try:
            self.slots = [self._new_slot(device_slot) for device_slot in device_slots]
            self._await_state("starting", settings.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closing = True
        if self.slots and ray.is_initialized():
            for method in ("close", "__ray_terminate__"):  # end the engine, then its process, so that both clean up
                wait_for_all([getattr(slot.actor, method).remote() for slot in self.live], _CLOSE_S)
            for slot in self.slots:
                ray.kill(slot.actor)
        self.slots = []
        self.dispatcher.clear()
        self._last_push = None
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    # --- live engines --------------------------------------------------------------------------------------

    @property
    def live(self) -> list[EngineSlot]:
        return [slot for slot in self.slots if slot.state == "live"]

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Process ids of the live engines, which change whenever an engine is replaced."""
        return tuple(slot.pid for slot in self.live)

    def remote_engines(self) -> RemoteEngines:
        """Returns the live engines in a form that another process can call."""
        live = tuple(slot.handle for slot in self.wait_for_live_engines())
        return RemoteEngines(live, self.settings.request_timeout_s)

    def wait_for_live_engines(self) -> list[EngineSlot]:
        """Waits until any engine is live and none is loading; returns the live engines.

        Replacements of lost engines may still be starting.
        """
        self.wait_for_loads()
        return self.live or self.wait_for_all_engines()

    def wait_for_all_engines(self) -> list[EngineSlot]:
        """Waits until all engines have started and loaded; returns them."""
        self._await_state("starting", self.settings.start_timeout_s)
        self.wait_for_loads()
        return self.live

    def wait_for_loads(self) -> None:
        """Waits until no engine reads the last push."""
        self._await_state("loading", self.settings.start_timeout_s)

    # --- calls ---------------------------------------------------------------------------------------------

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Calls a method of every live engine, each with its own arguments; returns their answers.

        Raises EngineLostInCall when an engine was lost.
        """
        live = self.wait_for_live_engines()
        pairs = zip(live, arguments, strict=True)
        answered = self.collect_results({slot.actor.call.remote(method, own): slot for slot, own in pairs}, method)
        lost = {str(slot.device_slot): slot.loss_reason for slot in live if slot not in answered}
        if lost:
            raise EngineLostInCall(engine_loss_message(lost, method))
        return list(answered.values())

    def collect_results(self, calls: dict[CallReference, EngineSlot], description: str) -> dict[EngineSlot, Any]:
        """Waits for calls and returns the engines' answers.

        Engines that died or are late are replaced, and their answers left out.
        """
        limit = self.settings.request_timeout_s
        finished_calls = wait_for_all(calls, limit)
        if len(finished_calls) < len(calls):
            log.error("stacks of all engines:\n%s", self.stacks())
        answered = {}
        for ref, slot in calls.items():
            if ref not in finished_calls:
                self.replace_lost_engine(slot, f"no answer to {description} within {limit:.0f} s (pid {slot.pid})")
                continue
            with suppress(EngineReplaced):
                answered[slot] = self.get_result(slot, ref)
        return answered

    def get_result(self, slot: EngineSlot, ref: CallReference) -> Any:
        """Returns the result of a call.

        Raises EngineReplaced, or EngineLost or ConfigError for the engine's error.
        """
        try:
            return ray.get(ref)
        except (RayActorError, ObjectLostError) as error:  # an answer stays on its host until it is fetched
            self.replace_lost_engine(slot, failure_cause(error))
            raise EngineReplaced from None
        except CALL_ERRORS as error:
            # The message has the remote traceback first, then the engine. A user's error keeps its message only.
            if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
                raise ConfigError(f"{error.cause}\n({slot.device_slot}, while {slot.state})") from None
            failed = f"{error}\n{slot.device_slot} failed while {slot.state}: {failure_cause(error)}"
            raise EngineLost(failed) from None

    # --- start, load and replacement of engines ------------------------------------------------------------

    def _new_slot(self, device_slot: DeviceSlot) -> EngineSlot:
        actor = start_actor(EngineActor, device_slot, self.settings.num_cpus_per_engine, CONCURRENCY_GROUPS)
        return EngineSlot(next(self._numbers), device_slot, actor, actor.start.remote(self._factory))

    def publish(self, handle: WeightHandle, version: int, updated_slots: Collection[EngineSlot] = ()) -> None:
        """Makes all live engines load a push, and later engines before they are live.

        updated_slots: engines that have these weights already.
        """
        self._last_push, self.version = handle, version
        for slot in self.live:
            if slot not in updated_slots:
                self._start_load(slot)
        self._await_state("loading", self.settings.start_timeout_s + self.settings.request_timeout_s)

    def finish_pending_call(self, slot: EngineSlot, value: Any) -> None:
        """Advances an engine's state when its start (value: process id) or its load is done."""
        slot.pending_call = None
        if slot.state == "starting":
            slot.pid = value
            if self._last_push is not None:
                self._start_load(slot)
                return
        if slot.is_replacement:
            slot.is_replacement = False
            log.warning("%s is back, with policy version %d (pid %d)", slot.device_slot, self.version, slot.pid)
        slot.state = "live"
        self.dispatcher.add_engine(slot.number)

    def _start_load(self, slot: EngineSlot) -> None:
        assert self._last_push is not None
        slot.state, slot.state_since = "loading", time.monotonic()
        slot.pending_call = slot.actor.load.remote(self._last_push, self.version)

    def replace_lost_engine(self, slot: EngineSlot, reason: str) -> None:
        """Requeues the requests of a lost engine and starts another engine on its devices.

        Raises:
            EngineLost: too many engines were lost in a row, or the pool is being closed. In the second case a failed
                push may have left a thread whose calls end with the actors; no engine may start then.
        """
        if self._closing:
            raise EngineLost(f"{slot.device_slot} ended with its pool: {reason}")
        groups = self.dispatcher.remove_engine(slot.number)
        log.warning("%s is lost with %d groups in flight: %s", slot.device_slot, len(groups), reason)
        ray.kill(slot.actor)
        slot.loss_reason = reason
        slot.pending_call, slot.poll_call, slot.request_calls = None, None, []
        in_a_row = slot.consecutive_losses + 1
        losses = [in_a_row, *(self.dispatcher.engine_losses[group.request_id] for group in groups)]
        if max(losses) >= self.settings.max_attempts:
            raise EngineLost(
                f"{slot.device_slot} was lost {in_a_row} times in a row, the last time with {len(groups)} groups in "
                f"flight: {reason}"
            )
        fresh = self._new_slot(slot.device_slot)
        fresh.consecutive_losses, fresh.is_replacement = in_a_row, True
        self.slots[self.slots.index(slot)] = fresh

    # --- deadlines -----------------------------------------------------------------------------------------

    def _await_state(self, state: str, limit: float) -> None:
        """Waits until no engine is in `state`; actors keep responses meanwhile."""
        deadline = time.monotonic() + limit
        while late := [slot for slot in self.slots if slot.state == state]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                names = ", ".join(str(slot.device_slot) for slot in late)
                raise EngineLost(
                    f"{self.stacks()}\nthe pool waited {limit:.0f} s for {names}, still {state} "
                    f"(inference_model.start_timeout_s); the stacks above show where; {free_resources()}"
                )
            owners = {slot.pending_call: slot for slot in late}
            for ref in wait_for_any(owners, min(remaining, 1.0)):
                with suppress(EngineReplaced):
                    self.finish_pending_call(owners[ref], self.get_result(owners[ref], ref))

    def check_deadlines(self) -> None:
        """Replaces engines that exceed the request timeout, and reports engines that start too slowly.

        Raises EngineLost if no engine becomes live in time.
        """
        now, limit = time.monotonic(), self.settings.request_timeout_s
        while (oldest := self.dispatcher.oldest_assignment()) is not None and now - oldest.assigned_at > limit:
            slot = next(slot for slot in self.slots if slot.number == oldest.engine)
            num_groups = len(self.dispatcher.engine_request_ids(slot.number))
            log.error("stacks of all engines:\n%s", self.stacks())
            self.replace_lost_engine(
                slot,
                f"group {oldest.request.request_id} of the {num_groups} groups of the engine was not finished "
                f"within {limit:.0f} s; the engine made {slot.steps} steps since its start (pid {slot.pid}); "
                "if the engine is only slow, raise inference_model.request_timeout_s",
            )
        # A late engine is reported once; the run ends if all engines are late.
        absent = [slot for slot in self.slots if slot.state != "live"]
        late = [slot for slot in absent if now - slot.state_since > self.settings.start_timeout_s]
        if len(late) == len(self.slots):
            raise EngineLost(self._missing_engines_message(late))
        for slot in late:
            if not slot.is_overdue:
                slot.is_overdue = True
                log.error("%s; the other engines continue", self._missing_engines_message([slot]))

    def _missing_engines_message(self, late: list[EngineSlot]) -> str:
        names = ", ".join(f"{slot.device_slot}, still {slot.state}" for slot in late)
        limit = self.settings.start_timeout_s
        return (
            f"{self.stacks()}\nthe pool waited {limit:.0f} s for {names}, to replace a lost engine "
            f"(inference_model.start_timeout_s); {free_resources()}"
        )

    def stacks(self) -> str:
        """Returns the stack traces of all threads of all engines."""
        return dump_stacks([slot.handle for slot in self.slots])
