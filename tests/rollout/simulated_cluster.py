"""A cluster of simulated engines on a virtual clock, for the bookkeeping of the overlapped schedule."""

import asyncio
import heapq
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from envs.group import Group, SampledCompletion, Sampling, Times
from envs.prompts import PromptQueue
from envs.task import Example
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.dispatch import Dispatch
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.group_buffer import GroupBuffer
from torchgrpo.rollout.stream import Stream

GROUPS_PER_WORKER = 4
KILLED_SHARE = 0.05
RESTART_S = 20.0
SIGMA = 1.0
MEAN_S = 1.0
LIMIT_S = 5.0
SAMPLING, NO_TIMES = Sampling(), Times(0.0, 0.0, 0.0)


class Rows:
    """A prompt source whose examples are numbered rows."""

    drawn = 0

    def draw(self) -> Example:
        self.drawn += 1
        return Example((), "", self.drawn - 1)

    def observe(self, example: Example, success: float) -> None:
        pass


class Groups:
    """Makes groups of one completion, without a tokenizer and graders."""

    lowest = SimpleNamespace(settle=lambda groups: None)  # nothing is judged

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop

    async def run_group(self, example: Example, group_id: int, drawn: Callable[[], None]) -> Group:
        completions = await self.loop.generate(Request(group_id, (), 1, SAMPLING, seed=0))
        drawn()
        return Group(group_id, example, (), "", SAMPLING, completions, NO_TIMES)


class Engines:
    """Simulated engines behind the real dispatch, on a virtual clock.

    A request takes a log-normal time, cut at a length limit. A killed engine's groups go back to the queue, and a new
    engine takes its place after a while. simulated_s: CPU seconds spent on the simulation. until: seconds on the clock
    that no step goes beyond.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.dispatch = Dispatch(window=GROUPS_PER_WORKER)
        self.chance = random.Random(seed)
        self.clock = 0.0
        self.version = 0
        self.killed = 0
        self.simulated_s = 0.0
        self.until = 0.0
        self.alive = list(range(count))
        self.next_engine = count
        # (when, engine, request id or -1: it starts, version)
        self.events: list[tuple[float, int, int, int]] = []
        for engine in self.alive:
            self.dispatch.open(engine)

    def submit(self, request: Request) -> None:
        self.dispatch.submit(request)

    def step(self, timeout: float) -> list[Response]:
        """Whatever finishes next."""
        given = self.dispatch.assign(self.clock)
        began = time.thread_time()
        for engine, requests in given.items():
            for request in requests:
                takes = min(LIMIT_S, MEAN_S * self.chance.lognormvariate(-SIGMA * SIGMA / 2, SIGMA))
                heapq.heappush(self.events, (self.clock + takes, engine, request.request_id, self.version))
        event = None
        if self.events and self.events[0][0] <= self.until:
            event = heapq.heappop(self.events)
        self.clock = max(self.clock, self.until if event is None else event[0])
        self.simulated_s += time.thread_time() - began
        return [] if event is None else self._happen(event)

    def _happen(self, event: tuple[float, int, int, int]) -> list[Response]:
        _, engine, request_id, version = event
        if request_id < 0:
            self.dispatch.open(engine)
            self.alive.append(engine)
            return []
        if not self.dispatch.finish(engine, request_id):
            return []  # it died before
        return [Response(request_id, [SampledCompletion([0], [0.0], [version], "stop")])]

    @property
    def in_flight(self) -> int:
        return self.dispatch.in_flight

    def close(self) -> None:
        pass

    def kill_one(self) -> None:
        index = self.chance.randrange(len(self.alive))
        self.alive[index], self.alive[-1] = self.alive[-1], self.alive[index]
        self.dispatch.engine_lost(self.alive.pop())
        heapq.heappush(self.events, (self.clock + RESTART_S, self.next_engine, -1, 0))
        self.next_engine += 1
        self.killed += 1


class Simulation:
    """An overlapped run: real loop, stream, buffer and dispatch around simulated engines and a simulated learner.

    The learner takes as long for a batch as the engines do on average. The age of every consumed group is asserted.

    Args:
        workers: engines at a time, of which 5%, at least one, are killed.
        groups: that are consumed in all.
        stale: `train.stale_groups`.
    """

    def __init__(self, workers: int, groups: int, max_age: int, stale: str, seed: int) -> None:
        self.batch = workers * GROUPS_PER_WORKER
        self.batches = max(1, groups // self.batch)
        self.max_age = max_age
        self.engines = Engines(workers, seed)
        self.loop = EngineLoop(self.engines, timeout=3600.0, wait_timeout=3600.0)
        self.source = Rows()
        self.prompts = PromptQueue(self.source)  # type: ignore[arg-type]
        self.buffer: GroupBuffer[Group] = GroupBuffer(
            self.batch, max_age, 1, capacity=2 * self.batch, keep_order=stale == "wait"
        )
        maker: Any = Groups(self.loop)
        self.stream = Stream(self.loop, maker, self.prompts, self.buffer, self.batch, timeout=0.0)
        self.stream.begin()
        self.begin, self.loop.before_step = self.loop.before_step, self._before_step
        self._finished = asyncio.Event()
        self.learner_free_at, self.learning, self.done = 0.0, False, 0
        kills = max(1, round(KILLED_SHARE * workers))
        self.due = sorted(self.engines.chance.sample(range(1, self.batches * self.batch), kills))
        self.consumed: list[int] = []
        self.most_held = 0
        self.cpu_s = 0.0
        self.oldest = 0

    def run(self) -> None:
        began = time.thread_time()
        self.loop.run(self._finished.wait())
        self.cpu_s = time.thread_time() - began - self.engines.simulated_s
        self.loop.close()

    def _before_step(self) -> None:
        """The learner, whose thread is as fast as can be; then groups begin in the room that it made."""
        while True:
            began = time.thread_time()
            self._learn()
            self.engines.simulated_s += time.thread_time() - began
            self.begin()
            if self.stream.groups_in_flight or self._finished.is_set():
                return
            self.engines.clock = self.engines.until  # nothing is generated before the learner is done

    def _learn(self) -> None:
        engines = self.engines
        if self.learning and engines.clock >= self.learner_free_at:
            self.learning, self.done = False, self.done + 1
            self.engines.version += 1
            self.buffer.pushed(self.engines.version)
        if not self.learning and self._consume():
            self.learning, self.learner_free_at = True, engines.clock + MEAN_S
        while self.due and len(self.consumed) >= self.due[0] and engines.alive:
            self.due.pop(0)
            engines.kill_one()
        engines.until = self.learner_free_at if self.learning else engines.clock + 1.0
        self.most_held = max(self.most_held, self.stream.groups_in_flight + self.buffer.ready)
        if self.done == self.batches:
            self._finished.set()

    def _consume(self) -> bool:
        began = time.thread_time()
        batch = self.buffer.take_now(self.stream._hand_back)
        self.engines.simulated_s -= time.thread_time() - began
        if batch is None:
            return False
        self.consumed += [group.example.row for group in batch]
        age = self.engines.version - min(group.version for group in batch)
        assert age <= self.max_age, f"a group of age {age} was consumed"
        self.oldest = max(self.oldest, age)
        return True

    def check(self) -> None:
        """Nothing is lost and nothing comes twice."""
        waiting = self.stream.outstanding() + list(self.prompts.returned)
        accounted = self.consumed + [example.row for example in waiting]
        assert len(accounted) == len(set(accounted)) == self.source.drawn, "a prompt is lost or doubled"
        assert set(accounted) == set(range(self.source.drawn))
