"""N engines as Ray actors that together speak the engine protocol.

    submit ─▶ waiting ──least loaded engine──▶ on one engine ─▶ step() returns the finished ones
                 ▲                                │
                 └── the engine died or is hung ──┘  a new actor starts, loads the current weights, goes on

Which group is where is the business of rollout/engines/dispatch.py; here are the actors. An engine may be lost at any
moment, in a push as in a step: the others go on, and the new actor joins them when it has started. `step` waits
for engines at most its timeout; every other wait has a deadline, and the stacks of all actors are shown when it
passes.

One thread uses a pool.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from config.errors import ConfigError
from rollout.engines.dispatch import Dispatch
from rollout.engines.host import Report, WeightHandle
from rollout.engines.pool_state import EngineLost, PoolSettings, Slot, stacks_of
from rollout.engines.ray_runtime import EnginePlace, begin_start, free_resources, start_host, start_ray
from rollout.engines.sampler import Engine, Request, Response
from rollout.weights.outgoing import Outgoing
from rollout.weights.transports import ObjectStore, SharedMemory, Transport

log = logging.getLogger(__name__)

_POLL_S = 2.0  # an idle poll returns after this long and is sent again
_CLOSE_S = 10.0
_LOST: Any = object()


class RayPool:
    """See the head of this file, and `rollout.engines.sampler.Engine` for the protocol.

    Args:
        factory: builds one engine inside its actor; must be picklable.
        places: one engine each.

    `request_push` is called when a new engine needs weights that no handle holds (native GPU transfer).

    Raises:
        ConfigError, EngineLost: an engine does not start; everything already started is taken down.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        places: Sequence[EnginePlace],
        settings: PoolSettings,
    ) -> None:
        self.settings = settings
        self.policy_version = 0
        self.transport: Transport = (SharedMemory if settings.address is None else ObjectStore)(self.deliver)
        self._factory = factory
        self.request_push: Callable[[], None] | None = None
        self._groups = Dispatch(settings.window)
        self._numbers = itertools.count()
        self._attempts: dict[int, int] = {}
        self._weights: WeightHandle | None = None
        self._pushed = False
        self._slots: list[Slot] = []
        self._closing = False
        self._owns_ray = start_ray(settings.address, len(places) * settings.num_cpus_per_engine)
        try:
            self._slots = [self._new_slot(place) for place in places]
            self._await_states("starting", settings.start_timeout_s)
        except BaseException:
            self.close()
            raise

    # --- the engine protocol -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self._groups.in_flight

    @property
    def received(self) -> frozenset[str]:
        """Names that reached every engine with the last push."""
        live = [slot.received for slot in self._slots if slot.state == "live"]
        return frozenset.intersection(*live) if live else frozenset()

    def submit(self, request: Request) -> None:
        self._groups.submit(request)

    def step(self, timeout: float) -> list[Response]:
        """Raises EngineLost when an engine cannot be replaced, or an engine's own exception."""
        self._dispatch()
        responses = self._progress(timeout)
        self._dispatch()
        self._check_deadlines()
        return responses

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._await_states("loading", self.settings.start_timeout_s)  # a new engine still reads the last push
        self.transport.push(Outgoing.of(weights), version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return next(iter(self.score_all(sequences).values()))

    def close(self) -> None:
        import ray

        self._closing = True
        if self._slots and ray.is_initialized():
            for end in ("close", "__ray_terminate__"):  # the engine, then its process, so that it cleans up
                calls = [getattr(slot.host, end).remote() for slot in self._slots if slot.state == "live"]
                ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_S) if calls else None
            for slot in self._slots:
                ray.kill(slot.host)
        self._slots = []
        self._groups.clear()
        self._weights = None
        self.transport.close()
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    # --- weights and scores on every engine ----------------------------------------------------------------

    def deliver(self, handle: WeightHandle, version: int) -> None:
        """Load published weights into every engine; engines that start later load them before they serve."""
        self._weights, self.policy_version, self._pushed = handle, version, True
        for slot in self._slots:
            if slot.state in ("live", "waiting for weights"):
                self._begin_load(slot)
        self._await_states("loading", self.settings.start_timeout_s + self.settings.request_timeout_s)

    def score_all(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, list[list[float]]]:
        """Every live engine's scores, by the engine's name; one that is lost over it is left out.

        Empty where all engines wait for the weights of a native push.
        """
        while live := self._live():
            answered = self._results({slot.host.score.remote(sequences): slot for slot in live}, "scores")
            if answered:
                return {slot.place.name: scores for slot, scores in answered.items()}
        return {}

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """The same method of every engine at once, each with its own arguments; in the engines' order.

        Raises EngineLost where one of them cannot answer: the others may have begun something with it.
        """
        ready = self._ready()
        pairs = zip(ready, arguments, strict=True)
        calls = {slot.host.call.remote(method, own): slot for slot, own in pairs}
        answered = self._results(calls, method)
        lost = [str(slot.place) for slot in ready if slot not in answered]
        if lost:
            raise EngineLost(f"{', '.join(lost)} was lost during {method}, which needs every engine")
        return list(answered.values())

    @property
    def members(self) -> tuple[int, ...]:
        """Process ids of the engines; one changes whenever an engine is replaced."""
        return tuple(slot.pid for slot in self._ready())

    def note_push(self, version: int, received: frozenset[str]) -> None:
        """A native transfer has brought these weights to every engine."""
        self._weights, self.policy_version, self._pushed = None, version, True
        for slot in self._ready():
            slot.received = received
            self._serve(slot)

    def sleep(self) -> None:
        """Every engine gives its GPU memory back; see `VLLMEngine.sleep`."""
        self.call_each("sleep", [{}] * len(self._slots))

    def wake(self) -> None:
        self.call_each("wake", [{}] * len(self._slots))

    def _ready(self) -> list[Slot]:
        """Every engine, once all have started and read what they were reading."""
        self._await_states("starting", self.settings.start_timeout_s)
        self._await_states("loading", self.settings.start_timeout_s)
        return self._slots

    def _live(self) -> list[Slot]:
        """The engines that serve; others may still be starting in the place of lost ones, if not all are."""
        self._await_states("loading", self.settings.start_timeout_s)
        if not any(slot.state == "live" for slot in self._slots):
            self._ready()
        return [slot for slot in self._slots if slot.state == "live"]

    def _results(self, calls: dict[Any, Slot], what: str) -> dict[Slot, Any]:
        """What the engines answered; one that died, or is late, is replaced and missing here."""
        import ray

        limit = self.settings.request_timeout_s
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit)
        if late:
            log.error("stacks of all engines:\n%s", self.stacks())
        answered = {}
        for ref, slot in calls.items():
            if ref in late:
                self._lost(slot, f"the pool waited {limit:.0f} s for {what} of it (pid {slot.pid})")
            elif (value := self._value(slot, ref)) is not _LOST:
                answered[slot] = value
        return answered

    # --- dispatch -------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Waiting groups go to the least loaded engine, as long as one has room."""
        given = self._groups.assign(time.monotonic())
        for slot in self._slots if given else ():
            if slot.number in given:
                slot.submitting.append(slot.host.submit.remote(given[slot.number]))

    def _progress(self, timeout: float) -> list[Response]:
        """Wait until some actor answers, at most `timeout` seconds; handle every answer that is there."""
        import ray

        for slot in self._slots:
            if slot.polling is None and self._groups.held(slot.number):
                slot.polling = slot.host.poll.options(concurrency_group="poll").remote(_POLL_S)
        owners = {ref: slot for slot in self._slots for ref in slot.references}
        if not owners:
            return []
        ray.wait(list(owners), timeout=timeout)
        ready, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
        responses: list[Response] = []
        for ref in ready:
            slot = owners[ref]
            if ref in slot.references:  # else the slot was lost a moment ago
                responses += self._answer(slot, ref)
        return responses

    def _value(self, slot: Slot, ref: Any) -> Any:
        """What a call returned; `_LOST` where it died with its engine. Raises what the engine raised."""
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

        try:
            return ray.get(ref)
        except (
            RayActorError,
            ObjectLostError,
        ) as error:  # an answer lies where it was made until it is fetched
            self._lost(slot, str(error).splitlines()[0])
            return _LOST
        except RayTaskError as error:
            raise self._failure(slot, error) from None

    def _answer(self, slot: Slot, ref: Any) -> list[Response]:
        value = self._value(slot, ref)
        if value is _LOST:
            return []
        if ref == slot.pending:
            self._arrived(slot, value)
            return []
        if ref != slot.polling:
            slot.submitting.remove(ref)
            return []
        slot.polling = None
        return self._reported(slot, value)

    def _reported(self, slot: Slot, report: Report) -> list[Response]:
        slot.steps = report.steps
        known = [one for one in report.responses if self._groups.finish(slot.number, one.request_id)]
        for response in known:
            self._attempts.pop(response.request_id, None)
            slot.losses = 0
        return known

    # --- the life of an engine ------------------------------------------------------------------------------

    def _new_slot(self, place: EnginePlace) -> Slot:
        host = start_host(place, self.settings.num_cpus_per_engine)
        return Slot(next(self._numbers), place, host, begin_start(host, self._factory))

    def _arrived(self, slot: Slot, value: Any) -> None:
        """A start or a load is done."""
        slot.pending = None
        if slot.state == "loading":
            slot.received = value
            self._serve(slot)
            return
        slot.pid = value
        if not self._pushed:
            self._serve(slot)
        elif self._weights is not None:
            self._begin_load(slot)
        else:
            slot.state, slot.since = "waiting for weights", time.monotonic()
            if self.request_push is not None:
                self.request_push()

    def _serve(self, slot: Slot) -> None:
        if slot.replaces_lost:
            slot.replaces_lost = False
            log.warning(
                "%s is back, with policy version %d (pid %d)", slot.place, self.policy_version, slot.pid
            )
        slot.state = "live"
        self._groups.open(slot.number)

    def _begin_load(self, slot: Slot) -> None:
        slot.state, slot.since = "loading", time.monotonic()
        slot.pending = slot.host.load.remote(self._weights, self.policy_version)

    def _lost(self, slot: Slot, why: str) -> None:
        """Queue the slot's groups anew and start another actor in its place.

        Raises EngineLost while the pool is being closed: a push that failed may have left a thread behind, whose
        calls end with the actors, and nothing may start beside or after the end.
        """
        import ray

        if self._closing:
            raise EngineLost(f"{slot.place} ended with its pool: {why}")
        groups = self._groups.lost(slot.number)
        log.warning("%s is lost with %d groups in flight: %s", slot.place, len(groups), why)
        ray.kill(slot.host)
        slot.pending, slot.polling, slot.submitting = None, None, []
        for request in groups:
            self._attempts[request.request_id] = self._attempts.get(request.request_id, 0) + 1
        worst = max((self._attempts[request.request_id] for request in groups), default=0)
        losses = slot.losses + 1
        if max(losses, worst) >= self.settings.max_attempts:
            raise EngineLost(
                f"{slot.place} was lost {losses} times in a row, the last time with {len(groups)} groups in "
                f"flight: {why}"
            )
        fresh = self._new_slot(slot.place)
        fresh.losses, fresh.replaces_lost = losses, True
        self._slots[self._slots.index(slot)] = fresh

    def _failure(self, slot: Slot, error: Any) -> Exception:
        """The remote traceback first, then which engine it was; of a user's error its message alone."""
        if isinstance(error.cause, ConfigError):
            return ConfigError(f"{error.cause}\n({slot.place}, while {slot.state})")
        return EngineLost(f"{error}\n{slot.place} failed while {slot.state}")

    # --- deadlines ------------------------------------------------------------------------------------------

    def _await_states(self, state: str, limit: float) -> None:
        """Wait until no slot is in `state`; responses that come meanwhile are kept by the actors."""
        deadline = time.monotonic() + limit
        while late := [slot for slot in self._slots if slot.state == state]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                names = ", ".join(str(slot.place) for slot in late)
                raise EngineLost(
                    f"{self.stacks()}\nthe pool waited {limit:.0f} s for {names}, still {state} "
                    f"(inference_model.start_timeout_s); where, the stacks above say; {free_resources()}"
                )
            self._settle([slot.pending for slot in late], min(remaining, 1.0))

    def _settle(self, references: list[Any], timeout: float) -> None:
        import ray

        owners = {slot.pending: slot for slot in self._slots}
        ready, _ = ray.wait(references, timeout=timeout)
        for ref in ready:
            self._answer(owners[ref], ref)

    def _check_deadlines(self) -> None:
        """An engine that holds a group beyond its time counts as hung."""
        now, limit = time.monotonic(), self.settings.request_timeout_s
        while (longest := self._groups.longest()) is not None and now - longest.since > limit:
            slot = next(slot for slot in self._slots if slot.number == longest.engine)
            log.error("stacks of all engines:\n%s", self.stacks())
            self._lost(
                slot,
                f"group {longest.request.request_id} of the {self._groups.held(slot.number)} there waited "
                f"{limit:.0f} s for it; it made {slot.steps} steps since "
                f"its start (pid {slot.pid}); if it is only slow, raise inference_model.request_timeout_s",
            )
        missing = [slot for slot in self._slots if slot.state in ("starting", "loading")]
        late = [slot for slot in missing if now - slot.since > self.settings.start_timeout_s]
        if len(late) == len(self._slots):
            raise EngineLost(self._missing(late))
        for slot in late:
            if not slot.reported:
                slot.reported = True
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
        return stacks_of(self._slots)
