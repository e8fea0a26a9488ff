"""Simulated engines and learner on a virtual clock, for tests of the overlapped schedule."""

import asyncio
import heapq
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from envs.group import Group, GroupTimes, SampledCompletion, Sampling
from envs.prompts import PromptQueue
from envs.task import Example
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.engines.request_dispatcher import RequestDispatcher
from torchgrpo.rollout.group_buffer import GroupBuffer
from torchgrpo.rollout.group_stream import GroupStream

GROUPS_PER_WORKER = 4
KILLED_SHARE = 0.05
RESTART_S = 20.0
SIGMA = 1.0
MEAN_S = 1.0
LIMIT_S = 5.0
SAMPLING, NO_TIMES = Sampling(), GroupTimes(0.0, 0.0, 0.0)


class NumberedPromptSource:
    """Prompt source whose examples are numbered rows."""

    num_examples = 0

    def next_example(self) -> Example:
        self.num_examples += 1
        return Example((), "", self.num_examples - 1)

    def observe(self, example: Example, success: float) -> None:
        pass


class SimulatedGroupRollout:
    """Rollout of groups with one completion, without a tokenizer and rewards."""

    lowest_scores = SimpleNamespace(record_and_lower=lambda groups: None)  # nothing is scored

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop

    async def run_group(self, example: Example, group_id: int, on_sampled: Callable[[], None]) -> Group:
        completions = await self.loop.generate(Request(group_id, (), 1, SAMPLING, seed=0))
        on_sampled()
        return Group(group_id, example, (), "", SAMPLING, completions, NO_TIMES)


class SimulatedEngines:
    """Simulated engines behind the real request dispatcher, on a virtual clock.

    A request takes a log-normal time, cut at a length limit. The groups of a killed engine return to the queue, and a
    new engine replaces it after `RESTART_S`. simulated_s: CPU seconds spent on the simulation. until: time on the
    clock that no step exceeds.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.dispatcher = RequestDispatcher(window=GROUPS_PER_WORKER)
        self.random = random.Random(seed)
        self.clock = 0.0
        self.version = 0
        self.num_killed = 0
        self.simulated_s = 0.0
        self.until = 0.0
        self.alive = list(range(count))
        self.next_engine = count
        # (time, engine, request id or -1 for the engine's start, policy version)
        self.events: list[tuple[float, int, int, int]] = []
        for engine in self.alive:
            self.dispatcher.add_engine(engine)

    def submit(self, request: Request) -> None:
        self.dispatcher.submit(request)

    def cancel(self, request_id: int) -> None:
        self.dispatcher.cancel(request_id)

    def step(self, timeout: float) -> list[Response]:
        """Advances the clock to the next event; returns the response that finishes then, if any."""
        assigned_requests = self.dispatcher.assign(self.clock)
        began = time.thread_time()
        for engine, requests in assigned_requests.items():
            for request in requests:
                takes = min(LIMIT_S, MEAN_S * self.random.lognormvariate(-SIGMA * SIGMA / 2, SIGMA))
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
            self.dispatcher.add_engine(engine)
            self.alive.append(engine)
            return []
        if not self.dispatcher.finish(engine, request_id):
            return []  # the engine died before
        return [Response(request_id, [SampledCompletion([0], [0.0], [version], "stop")])]

    @property
    def in_flight(self) -> int:
        return self.dispatcher.in_flight

    def close(self) -> None:
        pass

    def kill_one(self) -> None:
        index = self.random.randrange(len(self.alive))
        self.alive[index], self.alive[-1] = self.alive[-1], self.alive[index]
        self.dispatcher.remove_engine(self.alive.pop())
        heapq.heappush(self.events, (self.clock + RESTART_S, self.next_engine, -1, 0))
        self.next_engine += 1
        self.num_killed += 1


class Simulation:
    """Overlapped run with real loop, stream, buffer and dispatcher, and with simulated engines and learner.

    The learner takes as long for a batch as the engines do on average. The age of every consumed group is asserted.

    Args:
        workers: concurrent engines, of which 5%, at least one, are killed.
        groups: total number of consumed groups.
        stale: `train.stale_groups`.
    """

    def __init__(self, workers: int, groups: int, max_age: int, stale: str, seed: int) -> None:
        self.batch = workers * GROUPS_PER_WORKER
        self.batches = max(1, groups // self.batch)
        self.max_age = max_age
        self.engines = SimulatedEngines(workers, seed)
        self.loop = EngineLoop(self.engines, timeout=3600.0, wait_timeout=3600.0)
        self.source = NumberedPromptSource()
        self.prompts = PromptQueue(self.source)  # type: ignore[arg-type]
        self.buffer: GroupBuffer[Group] = GroupBuffer(
            self.batch, max_age, 1, capacity=2 * self.batch, keep_order=stale == "wait"
        )
        maker: Any = SimulatedGroupRollout(self.loop)
        self.stream = GroupStream(self.loop, maker, self.prompts, self.buffer, self.batch, timeout=0.0)
        self.stream.start()
        self.begin, self.loop.before_step = self.loop.before_step, self._before_step
        self._finish_event = asyncio.Event()
        self.learner_free_at, self.learning, self.num_trained_batches = 0.0, False, 0
        kills = max(1, round(KILLED_SHARE * workers))
        self.kill_points = sorted(self.engines.random.sample(range(1, self.batches * self.batch), kills))
        self.consumed_rows: list[int] = []
        self.max_groups_held = 0
        self.cpu_s = 0.0
        self.max_group_age = 0

    def run(self) -> None:
        began = time.thread_time()
        self.loop.run(self._finish_event.wait())
        self.cpu_s = time.thread_time() - began - self.engines.simulated_s
        self.loop.close()

    def _before_step(self) -> None:
        """Runs the learner at no time on the clock, then starts groups."""
        while True:
            began = time.thread_time()
            self._learn()
            self.engines.simulated_s += time.thread_time() - began
            self.begin()
            if self._finish_event.is_set():
                return
            if self.stream.groups_in_flight:
                self.loop._resume()  # the learner, which runs here, needs another step even if no group is left
                return
            self.engines.clock = self.engines.until  # no group is generated before the learner finishes

    def _learn(self) -> None:
        engines = self.engines
        if self.learning and engines.clock >= self.learner_free_at:
            self.learning, self.num_trained_batches = False, self.num_trained_batches + 1
            self.engines.version += 1
            self.buffer.set_version(self.engines.version)
        if not self.learning and self._consume():
            self.learning, self.learner_free_at = True, engines.clock + MEAN_S
        while self.kill_points and len(self.consumed_rows) >= self.kill_points[0] and engines.alive:
            self.kill_points.pop(0)
            engines.kill_one()
        engines.until = self.learner_free_at if self.learning else engines.clock + 1.0
        self.max_groups_held = max(self.max_groups_held, self.stream.groups_in_flight + self.buffer.groups_ready)
        if self.num_trained_batches == self.batches:
            self._finish_event.set()

    def _consume(self) -> bool:
        began = time.thread_time()
        batch = self.buffer.try_take_batch(self.stream._return_stale_group)
        self.engines.simulated_s -= time.thread_time() - began
        if batch is None:
            return False
        self.consumed_rows += [group.example.row for group in batch]
        age = self.engines.version - min(group.oldest_version for group in batch)
        assert age <= self.max_age, f"a group of age {age} was consumed"
        self.max_group_age = max(self.max_group_age, age)
        return True

    def check(self) -> None:
        """Asserts that no prompt is lost or doubled."""
        waiting = self.stream.outstanding_examples() + list(self.prompts.returned_examples)
        accounted = self.consumed_rows + [example.row for example in waiting]
        assert len(accounted) == len(set(accounted)) == self.source.num_examples, "a prompt is lost or doubled"
        assert set(accounted) == set(range(self.source.num_examples))
