"""Which group is on which engine: the least loaded takes the next one, nothing is lost, nothing comes twice.

    submit ─▶ waiting ──assign──▶ on one engine ──finish──▶ done
                 ▲                     │
                 └─ engine lost ───────┘

Bookkeeping only: no engine, no clock, no waiting. Every operation costs at most the logarithm of the number of
engines, however many groups they hold.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from rollout.engines.sampler import Request


class Assigned(NamedTuple):
    """A group and the engine that it has been on since then."""

    request: Request
    engine: int
    since: float


class Dispatch:
    """Engines are known by integers that never recur.

    Args:
        window: completions that one engine holds at a time; further groups wait here, so that whichever engine
            is free first takes them. A larger group goes to an engine that holds nothing.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.waiting: deque[Request] = deque()
        self._times_lost: dict[int, int] = {}
        self._assigned: OrderedDict[int, tuple[Request, int, float]] = (
            OrderedDict()
        )  # the longest there first
        self._held: dict[int, set[int]] = {}
        self._load: dict[int, int] = {}
        self._by_load: list[
            tuple[int, int]
        ] = []  # a heap of (load, engine) without full ones; outdated are skipped

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self._assigned)

    def held(self, engine: int) -> int:
        """Groups that an engine holds; none before it is opened."""
        return len(self._held.get(engine, ()))

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def open(self, engine: int) -> None:
        """From now on the engine takes groups; nothing new for one that does."""
        if engine not in self._held:
            self._held[engine] = set()
            self._set_load(engine, 0)

    def engine_lost(self, engine: int) -> list[Request]:
        """The engine is gone. Its groups, which are now the first to be assigned again."""
        self._load.pop(engine, None)
        held = sorted(self._held.pop(engine, ()))
        back = [self._assigned.pop(request_id)[0] for request_id in held]
        self.waiting.extendleft(reversed(back))
        for request_id in held:
            self._times_lost[request_id] = self._times_lost.get(request_id, 0) + 1
        return back

    def times_lost(self, requests: Sequence[Request]) -> int:
        """Engines that were lost with one of these unfinished groups; of the one that met the most."""
        return max((self._times_lost.get(request.request_id, 0) for request in requests), default=0)

    def assign(self, now: float) -> dict[int, list[Request]]:
        """Give waiting groups to engines as long as one has room; what each one got."""
        given: dict[int, list[Request]] = {}
        while self.waiting:
            engine, request = self._least_loaded(), self.waiting[0]
            if engine is None:
                break
            held, load = self._held[engine], self._load[engine] + request.n
            if held and load > self.window:
                break
            self.waiting.popleft()
            self._assigned[request.request_id] = request, engine, now
            held.add(request.request_id)
            self._set_load(engine, load)
            given.setdefault(engine, []).append(request)
        return given

    def finish(self, engine: int, request_id: int) -> bool:
        """Whether this engine's answer counts: it does when the group is on that engine."""
        held = self._held.get(engine)
        if held is None or request_id not in held:
            return False
        held.remove(request_id)
        self._times_lost.pop(request_id, None)
        self._set_load(engine, self._load[engine] - self._assigned.pop(request_id)[0].n)
        return True

    def longest(self) -> Assigned | None:
        """The group that has been on an engine for the longest time."""
        return next((Assigned(*assigned) for assigned in self._assigned.values()), None)

    def clear(self) -> None:
        """Forget every group and every engine."""
        self.waiting.clear()
        self._times_lost.clear()
        self._assigned.clear()
        self._held.clear()
        self._load.clear()

    def _set_load(self, engine: int, load: int) -> None:
        self._load[engine] = load
        if load >= self.window:
            return
        if len(self._by_load) > 8 * len(self._load):
            self._by_load = [(load, engine) for engine, load in self._load.items() if load < self.window]
            heapq.heapify(self._by_load)
        else:
            heapq.heappush(self._by_load, (load, engine))

    def _least_loaded(self) -> int | None:
        while self._by_load:
            load, engine = self._by_load[0]
            if self._load.get(engine) == load:
                return engine
            heapq.heappop(self._by_load)
        return None
