"""N engines that together look like one.

    submit ─▶ waiting ──least loaded engine──▶ on one engine ─▶ step() returns the finished ones
                 ▲                                │
                 └── the engine died or is hung ──┘  a new one starts, loads the last push, goes on

    load ─▶ straight to every live engine, where there is a way ─▶ host copy ─▶ engines that have not got it yet

Which group is where is the business of rollout/engines/dispatch.py, the engines' life that of
rollout/engines/supervisor.py; here is the face. `step` waits for engines at most its timeout. One thread uses a pool.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress

import torch

from torchgrpo.cluster.calls import wait_for_any
from torchgrpo.cluster.runtime import Place
from torchgrpo.rollout.engines.engine_actor import Report
from torchgrpo.rollout.engines.interface import Engine, Request, Response, SequenceScores
from torchgrpo.rollout.engines.remote_calls import CallBroken
from torchgrpo.rollout.engines.supervisor import HostLost, PoolSettings, Slot, Supervisor
from torchgrpo.rollout.weights.host_copy import Transport
from torchgrpo.rollout.weights.outgoing import Outgoing

log = logging.getLogger(__name__)


class RayPool:
    """Engines in Ray actors; speaks the protocols of `Engine`.

    transport: the way of a push into the engines. The other arguments, and what is raised: see `Supervisor`.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        places: Sequence[Place],
        settings: PoolSettings,
        transport: Transport,
    ) -> None:
        self._transport = transport
        self.supervisor = Supervisor(factory, places, settings)
        self._groups = self.supervisor.groups
        self._sent: tuple[tuple[int, ...], dict[str, Hashable]] = (), {}

    def close(self) -> None:
        self.supervisor.close()
        self._transport.copy.close()

    # --- SteppedEngine -------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self._groups.in_flight

    def submit(self, request: Request) -> None:
        self._groups.submit(request)

    def step(self, timeout: float) -> list[Response]:
        """Raises EngineLost when an engine cannot be replaced, or an engine's own exception."""
        self._dispatch()
        responses = self._progress(timeout)
        self._dispatch()
        self.supervisor.check_deadlines()
        return responses

    def _dispatch(self) -> None:
        """Waiting groups go to the least loaded engine, as long as one has room."""
        given = self._groups.assign(time.monotonic())
        for slot in self.supervisor.slots if given else ():
            if slot.number in given:
                slot.submitting.append(slot.actor.submit.remote(given[slot.number]))

    def _progress(self, timeout: float) -> list[Response]:
        """Wait until some engine answers, at most `timeout` seconds; handle every answer that is there."""
        for slot in self.supervisor.slots:
            if slot.polling is None and self._groups.busy(slot.number):
                # An idle poll returns after two seconds and is sent again.
                slot.polling = slot.actor.poll.options(concurrency_group="poll").remote(2.0)
        owners = {ref: slot for slot in self.supervisor.slots for ref in slot.references}
        if not owners:
            return []
        responses: list[Response] = []
        for ref in wait_for_any(owners, timeout):
            slot = owners[ref]
            if ref in slot.references:  # else the engine was lost a moment ago
                with suppress(HostLost):
                    value = self.supervisor.result_of(slot, ref)
                    if ref == slot.polling:
                        slot.polling = None
                        responses += self._reported(slot, value)
                    elif ref == slot.pending:
                        self.supervisor.arrived(slot, value)
                    else:
                        slot.submitting.remove(ref)
        return responses

    def _reported(self, slot: Slot, report: Report) -> list[Response]:
        slot.steps = report.steps
        known = [one for one in report.responses if self._groups.finish(slot.number, one.request_id)]
        if known:
            slot.lost_in_a_row = 0
        for response in known:
            for one in response.completions:
                one.engine = slot.name
        return known

    # --- WeightTarget --------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self.supervisor.version

    @property
    def members(self) -> tuple[int, ...]:
        return self.supervisor.members

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """The host copy is written when engines that a direct transfer reached serve again, and is there when this
        returns: before the learner changes its weights, which it is made from."""
        outgoing = Outgoing.of(weights)
        self.supervisor.wait_for_loads()  # a new engine still reads the copy that is overwritten here
        served = self._send(outgoing, version)
        self.supervisor.publish(self._transport.copy.write(outgoing), version, served)

    def _send(self, weights: Outgoing, version: int) -> list[Slot]:
        """Straight to the live engines, where there is such a way; those that have the weights now.

        What never changes is left out while they are those of the push before. Where one is lost in the middle, the
        others may hold half a push, or wait for a peer that is gone: they are replaced too, and all load the host copy.
        """
        if self._transport.direct is None:
            return []
        reached = self.supervisor.wait_for_some()
        members, (before, held) = self.supervisor.members, self._sent
        try:
            lacking = weights.parts_beyond(held if members == before else {})
            self._transport.direct.push(lacking, version, self.supervisor)
        except CallBroken as broken:
            log.warning("%s; the others start anew, and all load the copy in memory", broken)
            for slot in self.supervisor.live:
                self.supervisor.engine_lost(slot, "another engine was lost in the push that it took part in")
            return []
        self._sent = members, weights.constants
        return reached

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        """Every live engine's; one that is lost over it is left out."""
        while True:
            calls = {slot.actor.score.remote(sequences): slot for slot in self.supervisor.wait_for_some()}
            answered = self.supervisor.results(calls, "scores")
            if answered:
                return {slot.name: scores for slot, scores in answered.items()}

    def sleep(self) -> None:
        self._sent = (), {}
        self._all("sleep")

    def wake(self) -> None:
        self._all("wake")

    def _all(self, method: str) -> None:
        self.supervisor.call_each(method, [{}] * len(self.supervisor.wait_for_every()))
