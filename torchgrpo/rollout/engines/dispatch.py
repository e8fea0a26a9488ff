"""Which group is on which engine: the least loaded takes the next one, nothing is lost, nothing comes twice.

    submit ─▶ waiting ──assign──▶ on one engine ──finish──▶ done
                 ▲                     │
                 └─ engine lost ───────┘

Bookkeeping only: no engine, no clock, no waiting. No operation takes longer where there are more engines or groups;
but where an engine is lost, all groups are gone through.
"""

from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

from torchgrpo.rollout.engines.interface import Request


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
        self.times_lost: dict[int, int] = {}  # engines that were lost with each unfinished group
        self._assigned: OrderedDict[int, Assigned] = OrderedDict()  # the longest there first
        self._load: dict[int, int] = {}
        # Engines by their load, but full ones.
        self._with: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._least = window  # none has less

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self._assigned)

    def busy(self, engine: int) -> bool:
        """Whether an engine holds any group; none does before it is opened."""
        return self._load.get(engine, 0) > 0

    def held(self, engine: int) -> list[int]:
        """Ids of the groups that an engine holds, in the order of submission."""
        return sorted(request_id for request_id, there in self._assigned.items() if there.engine == engine)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def open(self, engine: int) -> None:
        """From now on the engine takes groups; nothing new for one that does."""
        if engine not in self._load:
            self._load[engine] = 0
            self._set_load(engine, 0)

    def engine_lost(self, engine: int) -> list[Request]:
        """The engine is gone. Its groups, which are now the first to be assigned again."""
        if engine in self._load:
            self._with[self._load.pop(engine)].pop(engine, None)
        held = self.held(engine)
        back = [self._assigned.pop(request_id).request for request_id in held]
        self.waiting.extendleft(reversed(back))
        for request_id in held:
            self.times_lost[request_id] = self.times_lost.get(request_id, 0) + 1
        return back

    def assign(self, now: float) -> dict[int, list[Request]]:
        """Give waiting groups to engines as long as one has room; what each one got."""
        given: dict[int, list[Request]] = {}
        while self.waiting:
            while self._least < self.window and not self._with[self._least]:
                self._least += 1
            if self._least == self.window:
                break
            # Of several, the one that has been so for the longest time.
            engine = next(iter(self._with[self._least]))
            request = self.waiting[0]
            before = self._load[engine]
            if before and before + request.n > self.window:
                break
            self.waiting.popleft()
            self._assigned[request.request_id] = Assigned(request, engine, now)
            self._set_load(engine, before + request.n)
            given.setdefault(engine, []).append(request)
        return given

    def finish(self, engine: int, request_id: int) -> bool:
        """Whether this engine's answer counts: it does when the group is on that engine."""
        assigned = self._assigned.get(request_id)
        if assigned is None or assigned.engine != engine:
            return False
        del self._assigned[request_id]
        self.times_lost.pop(request_id, None)
        self._set_load(engine, self._load[engine] - assigned.request.n)
        return True

    def longest(self) -> Assigned | None:
        """The group that has been on an engine for the longest time."""
        return next(iter(self._assigned.values()), None)

    def clear(self) -> None:
        """Forget every group and every engine."""
        self.waiting.clear()
        self.times_lost.clear()
        self._assigned.clear()
        self._load.clear()
        self._with.clear()

    def _set_load(self, engine: int, load: int) -> None:
        self._with[self._load[engine]].pop(engine, None)
        self._load[engine] = load
        if load < self.window:
            self._with[load][engine] = None
            if load < self._least:
                self._least = load
