"""Ray engine pool behind the `Engine` protocol, over a request dispatcher and an engine supervisor.

    submit ─▶ waiting ──least loaded engine──▶ on one engine ─▶ step() returns finished requests
                 ▲                                │
                 └── the engine died or hangs ────┘  a new engine starts, loads the last push, continues
    cancel ─▶ the request leaves the queue or its engine; a response that is under way does not count

    load ─▶ direct transfer to every live engine, if available ─▶ host copy ─▶ engines that lack the push

rollout/engines/request_dispatcher.py assigns requests to engines, and rollout/engines/engine_supervisor.py starts and
replaces engines. `step` waits for engines at most its timeout. One thread uses a pool.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress

import torch

from torchgrpo.cluster.actor_calls import wait_for_any
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.rollout.engines.engine_actor import PollReport
from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings, EngineReplaced, EngineSlot, EngineSupervisor
from torchgrpo.rollout.engines.interface import Engine, Request, Response, SequenceScores
from torchgrpo.rollout.engines.remote_engines import EngineLostInCall
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.weight_update import WeightUpdate

log = logging.getLogger(__name__)


class RayEnginePool:
    """Engines in Ray actors behind the protocols of `Engine`.

    transport: transfers pushes to the engines. For the other arguments and the exceptions see `EngineSupervisor`.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        device_slots: Sequence[DeviceSlot],
        settings: EnginePoolSettings,
        transport: WeightTransport,
    ) -> None:
        self._transport = transport
        self.supervisor = EngineSupervisor(factory, device_slots, settings)
        self._dispatcher = self.supervisor.dispatcher
        self._last_direct_push: tuple[tuple[int, ...], dict[str, Hashable]] = (), {}

    def close(self) -> None:
        self.supervisor.close()
        self._transport.host_copy.close()

    # --- SteppedEngine -------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self._dispatcher.in_flight

    def submit(self, request: Request) -> None:
        self._dispatcher.submit(request)

    def cancel(self, request_id: int) -> None:
        engine = self._dispatcher.cancel(request_id)
        for slot in self.supervisor.slots:
            if slot.number == engine:
                slot.request_calls.append(slot.actor.cancel.remote(request_id))

    def step(self, timeout: float) -> list[Response]:
        """Dispatches waiting requests and returns responses that finish within `timeout` seconds.

        Raises EngineLost when an engine cannot be replaced, or an engine's own exception.
        """
        self._dispatch_requests()
        responses = self._handle_answers(timeout)
        self._dispatch_requests()
        self.supervisor.check_deadlines()
        return responses

    def _dispatch_requests(self) -> None:
        """Sends waiting requests to the least loaded engines, while any engine has room."""
        assigned_requests = self._dispatcher.assign(time.monotonic())
        for slot in self.supervisor.slots if assigned_requests else ():
            if slot.number in assigned_requests:
                slot.request_calls.append(slot.actor.submit.remote(assigned_requests[slot.number]))

    def _handle_answers(self, timeout: float) -> list[Response]:
        """Waits at most `timeout` seconds for an engine's answer; handles all answers that have arrived."""
        for slot in self.supervisor.slots:
            if slot.poll_call is None and self._dispatcher.has_requests(slot.number):
                # An idle poll returns after two seconds and is sent again.
                slot.poll_call = slot.actor.poll.options(concurrency_group="poll").remote(2.0)
        owners = {ref: slot for slot in self.supervisor.slots for ref in slot.pending_calls}
        if not owners:
            return []
        responses: list[Response] = []
        for ref in wait_for_any(owners, timeout):
            slot = owners[ref]
            if ref in slot.pending_calls:  # otherwise the engine was lost while earlier answers were handled
                with suppress(EngineReplaced):
                    value = self.supervisor.get_result(slot, ref)
                    if ref == slot.poll_call:
                        slot.poll_call = None
                        responses += self._handle_report(slot, value)
                    elif ref == slot.pending_call:
                        self.supervisor.finish_pending_call(slot, value)
                    else:
                        slot.request_calls.remove(ref)
        return responses

    def _handle_report(self, slot: EngineSlot, report: PollReport) -> list[Response]:
        """Returns the responses of a poll that count, with the engine's name in each completion."""
        slot.steps = report.steps
        counted_responses = [one for one in report.responses if self._dispatcher.finish(slot.number, one.request_id)]
        if counted_responses:
            slot.consecutive_losses = 0
        for response in counted_responses:
            for one in response.completions:
                one.engine = slot.name
        return counted_responses

    # --- WeightTarget --------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self.supervisor.version

    @property
    def engine_pids(self) -> tuple[int, ...]:
        return self.supervisor.engine_pids

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Pushes weights to all live engines and writes the host copy for later engines.

        After a direct transfer, its engines already serve while the host copy is written. The host copy is complete
        when this method returns, before the learner changes the weights that it is made from.
        """
        update = WeightUpdate.from_pairs(weights)
        self.supervisor.wait_for_loads()  # an engine that loads reads the host copy, which is overwritten below
        updated_slots = self._push_directly(update, version)
        self.supervisor.publish(self._transport.host_copy.write(update), version, updated_slots)

    def _push_directly(self, weights: WeightUpdate, version: int) -> list[EngineSlot]:
        """Pushes weights by direct transfer, if available; returns the engines that received them.

        Constant tensors are left out if the engines are those of the push before. If an engine is lost during the
        transfer, the others may hold a partial push or wait for a lost peer. They are then replaced too, and all
        engines load the host copy.
        """
        if self._transport.direct is None:
            return []
        slots = self.supervisor.wait_for_live_engines()
        engine_pids, (pids_before, constants_before) = self.supervisor.engine_pids, self._last_direct_push
        try:
            missing = weights.missing_modules(constants_before if engine_pids == pids_before else {})
            self._transport.direct.push(missing, version, self.supervisor)
        except EngineLostInCall as error:
            log.warning("%s; the other engines are replaced, and all engines load the weights in memory", error)
            for slot in self.supervisor.live:
                self.supervisor.replace_lost_engine(slot, "another engine was lost in the same weight push")
            return []
        self._last_direct_push = engine_pids, weights.constants
        return slots

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        """Scores sequences with every live engine, except engines lost during the call."""
        while True:
            calls = {slot.actor.score.remote(sequences): slot for slot in self.supervisor.wait_for_live_engines()}
            answered = self.supervisor.collect_results(calls, "score")
            if answered:
                return {slot.name: scores for slot, scores in answered.items()}

    def sleep(self) -> None:
        self._last_direct_push = (), {}
        self._call_all("sleep")

    def wake(self) -> None:
        self._call_all("wake")

    def _call_all(self, method: str) -> None:
        self.supervisor.call_each(method, [{}] * len(self.supervisor.wait_for_all_engines()))
