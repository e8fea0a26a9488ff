"""Virtual clock with simulated engines and episodes for tests of the engine loop.

Time passes only while asyncio sleeps and while a simulated engine steps, so results do not depend on the machine.
"""

import asyncio
import heapq
import random
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from selectors import SelectorKey

from envs.group import SampledCompletion, Sampling
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request, Response


@dataclass
class VirtualClock:
    """Clock that simulated engines and a sleeping loop advance. seconds: its time."""

    seconds: float = 0.0

    @contextmanager
    def loops(self) -> Iterator[None]:
        """Makes asyncio create loops on this clock during the block."""
        clock = self

        class Policy(asyncio.DefaultEventLoopPolicy):
            def new_event_loop(self) -> asyncio.AbstractEventLoop:
                return _VirtualLoop(clock)

        before = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(Policy())
        try:
            yield
        finally:
            asyncio.set_event_loop_policy(before)


class _VirtualSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Selector that advances the clock instead of waiting."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        ready: list[tuple[SelectorKey, int]] = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("nothing is scheduled, and the virtual clock would stand still")
        if timeout and not ready:
            self.clock.seconds += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_VirtualSelector(clock))
        self.clock = clock

    def time(self) -> float:
        return self.clock.seconds


@dataclass
class VirtualEngine:
    """Engine whose requests all take `tokens` steps of `step_s` seconds.

    Args:
        is_remote: steps pass by themselves, as in the engines of a pool, and `step` waits for the first response at
            most its timeout. Otherwise each call of `step` takes `step_s` seconds, as in an engine in this process.
        answer: token ids of every completion; zeros by default.

    steps: number of calls of `step`.
    """

    clock: VirtualClock
    step_s: float
    tokens: int
    is_remote: bool
    answer: list[int] = field(default_factory=list)
    steps: int = 0
    _running: list[tuple[float, int]] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        steps_before = -(-self.clock.seconds // self.step_s)
        ends_at = (steps_before + self.tokens) * self.step_s if self.is_remote else self.steps + self.tokens
        heapq.heappush(self._running, (ends_at, request.request_id))

    def cancel(self, request_id: int) -> None:
        self._running = [one for one in self._running if one[1] != request_id]
        heapq.heapify(self._running)

    def step(self, timeout: float) -> list[Response]:
        self.steps += 1
        if not self.is_remote:
            self.clock.seconds += self.step_s
        elif self._running:
            self.clock.seconds = max(self.clock.seconds, min(self._running[0][0], self.clock.seconds + timeout))
        reached = self.clock.seconds if self.is_remote else self.steps
        responses = []
        while self._running and self._running[0][0] <= reached + 1e-9:
            _, request_id = heapq.heappop(self._running)
            zeros = [0] * self.tokens
            completion = SampledCompletion(self.answer or zeros, [0.0] * self.tokens, zeros, "stop")
            responses.append(Response(request_id, [completion]))
        return responses

    def close(self) -> None:
        pass


@dataclass
class VirtualEpisodes:
    """Episodes that alternate between turns of the engine and waits for their environments.

    A place runs one episode after another; the first begin at random times. An episode begins with a wait, its reset,
    and has another between two turns, each of 0.8 to 1.2 times `wait_s`.

    Attributes:
        shares: ideal / actual seconds of each episode, where the ideal is the sum of its waits and its steps.
        cpu_s: CPU seconds of the whole run.
    """

    episodes: int
    step_s: float = 0.005
    tokens: int = 8
    turns: int = 4
    wait_s: float = 0.1
    is_remote: bool = True
    rounds: int = 4
    shares: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def mean_share(self) -> float:
        return sum(self.shares) / len(self.shares)

    def run(self) -> None:
        clock = VirtualClock()
        engine = VirtualEngine(clock, self.step_s, self.tokens, self.is_remote)
        with clock.loops():
            loop = EngineLoop(engine, timeout=1e9, wait_timeout=1e9)  # type: ignore[arg-type]
        began = time.thread_time()
        loop.run_all([self._run_place(loop, clock, random.Random(place)) for place in range(self.episodes)])
        self.cpu_s = time.thread_time() - began
        loop.close()

    async def _run_place(self, loop: EngineLoop, clock: VirtualClock, chance: random.Random) -> None:
        with loop.outside_engine():
            await asyncio.sleep(chance.uniform(0, self.turns * self.wait_s))
        for _ in range(self.rounds):
            waits = [self.wait_s * chance.uniform(0.8, 1.2) for _ in range(self.turns)]
            began = clock.seconds
            for wait in waits:
                with loop.outside_engine():
                    await asyncio.wait_for(asyncio.sleep(wait), 60)  # as the deadline of a tool
                await loop.generate(Request(0, (), 1, Sampling(), seed=0))
            ideal = sum(waits) + self.turns * self.tokens * self.step_s
            self.shares.append(ideal / (clock.seconds - began))
