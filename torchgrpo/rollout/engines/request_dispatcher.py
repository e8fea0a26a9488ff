"""Request bookkeeping: assignment to the least loaded engine, and requeueing after an engine is lost.

    submit ─▶ waiting ──assign──▶ on one engine ──finish──▶ done
                 ▲                     │
                 └─ engine lost ───────┘

No request is lost, and none is answered twice. A request is one group. The dispatcher is bookkeeping only: it calls no
engine, reads no clock and never waits. Every operation takes constant time, with two exceptions: the loss of an engine
goes through all assigned requests, and the cancellation of a waiting request through all waiting ones.
"""

from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

from torchgrpo.rollout.engines.interface import Request


class AssignedRequest(NamedTuple):
    """Request with its engine and the time of its assignment."""

    request: Request
    engine: int
    assigned_at: float


class RequestDispatcher:
    """Assigns requests to engines, which are identified by integers that never recur.

    Args:
        window: completions that one engine holds at a time. Further groups wait here, so that the first free engine
            takes them. A group larger than the window goes to an engine without requests.

    waiting_requests: requests without an engine. engine_losses: number of engines lost with each unfinished request,
    by request id.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.waiting_requests: deque[Request] = deque()
        self.engine_losses: dict[int, int] = {}
        self._assignments: OrderedDict[int, AssignedRequest] = OrderedDict()  # oldest first
        self._load: dict[int, int] = {}
        # Engines by load; engines with a full window are left out.
        self._engines_by_load: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._least_load = window  # lower bound of all loads

    @property
    def in_flight(self) -> int:
        return len(self.waiting_requests) + len(self._assignments)

    def has_requests(self, engine: int) -> bool:
        """Whether an engine holds any request; False before the engine is added."""
        return self._load.get(engine, 0) > 0

    def engine_request_ids(self, engine: int) -> list[int]:
        """Returns the ids of an engine's requests, in the order of submission."""
        return sorted(request_id for request_id, assignment in self._assignments.items() if assignment.engine == engine)

    def submit(self, request: Request) -> None:
        self.waiting_requests.append(request)

    def add_engine(self, engine: int) -> None:
        """Makes an engine available for requests; no effect if it is available already."""
        if engine not in self._load:
            self._load[engine] = 0
            self._set_load(engine, 0)

    def remove_engine(self, engine: int) -> list[Request]:
        """Removes a lost engine and puts its requests first in the queue; returns these requests."""
        if engine in self._load:
            self._engines_by_load[self._load.pop(engine)].pop(engine, None)
        request_ids = self.engine_request_ids(engine)
        requeued = [self._assignments.pop(request_id).request for request_id in request_ids]
        self.waiting_requests.extendleft(reversed(requeued))
        for request_id in request_ids:
            self.engine_losses[request_id] = self.engine_losses.get(request_id, 0) + 1
        return requeued

    def assign(self, timestamp: float) -> dict[int, list[Request]]:
        """Assigns waiting requests while any engine has room; returns the new requests of each engine.

        timestamp: current time, which `AssignedRequest.assigned_at` records.
        """
        assigned_requests: dict[int, list[Request]] = {}
        while self.waiting_requests:
            while self._least_load < self.window and not self._engines_by_load[self._least_load]:
                self._least_load += 1
            if self._least_load == self.window:
                break
            # Of equally loaded engines, take the engine whose load is the oldest.
            engine = next(iter(self._engines_by_load[self._least_load]))
            request = self.waiting_requests[0]
            before = self._load[engine]
            if before and before + request.n > self.window:
                break
            self.waiting_requests.popleft()
            self._assignments[request.request_id] = AssignedRequest(request, engine, timestamp)
            self._set_load(engine, before + request.n)
            assigned_requests.setdefault(engine, []).append(request)
        return assigned_requests

    def finish(self, engine: int, request_id: int) -> bool:
        """Marks a request as finished; returns False if it is not assigned to this engine.

        The answer of an engine to a request that it does not hold does not count.
        """
        assignment = self._assignments.get(request_id)
        if assignment is None or assignment.engine != engine:
            return False
        del self._assignments[request_id]
        self.engine_losses.pop(request_id, None)
        self._set_load(engine, self._load[engine] - assignment.request.n)
        return True

    def cancel(self, request_id: int) -> int | None:
        """Removes a request, wherever it is; returns the engine that holds it, or None."""
        assignment = self._assignments.get(request_id)
        if assignment is not None:
            self.finish(assignment.engine, request_id)
            return assignment.engine
        self.waiting_requests = deque(one for one in self.waiting_requests if one.request_id != request_id)
        self.engine_losses.pop(request_id, None)
        return None

    def oldest_assignment(self) -> AssignedRequest | None:
        """Returns the request that has been on an engine for the longest time, or None."""
        return next(iter(self._assignments.values()), None)

    def clear(self) -> None:
        """Removes all requests and engines."""
        self.waiting_requests.clear()
        self.engine_losses.clear()
        self._assignments.clear()
        self._load.clear()
        self._engines_by_load.clear()

    def _set_load(self, engine: int, load: int) -> None:
        self._engines_by_load[self._load[engine]].pop(engine, None)
        self._load[engine] = load
        if load < self.window:
            self._engines_by_load[load][engine] = None
            if load < self._least_load:
                self._least_load = load
