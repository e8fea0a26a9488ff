"""The overlapped schedule's bookkeeping at cluster size: real controller, buffer and dispatch, simulated engines.

    python benchmarks/scheduler.py [--groups 100000] [--workers 1 8 64 512]

Engines are a heap of sampled finishing times (log-normal, cut at a length limit) on a virtual clock, the learner
takes a fixed time for a batch, as long as the engines do on average. Now and then an engine is killed, 5% of them
in all and at least one: its groups go back to the queue, and a new one takes its place after a while. Every
consumed group's age is asserted; at the end every prompt that was drawn must have been consumed exactly once or be
handed back.

Prints CPU microseconds a group in controller, buffer and dispatch (without the simulation), and the most groups
ever held, for each number of workers. The time has to stay flat and the memory in proportion to the workers.
"""

import argparse
import gc
import heapq
import random
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from rollout.controller import Controller  # noqa: E402

from envs.group import SampledCompletion, Sampling  # noqa: E402
from rollout.engines.dispatch import Dispatch  # noqa: E402
from rollout.engines.sampler import Request, Response  # noqa: E402
from rollout.group_buffer import GroupBuffer  # noqa: E402

GROUPS_PER_WORKER = 4
KILLED_SHARE = 0.05
RESTART_S = 20.0
SIGMA = 1.0
MEAN_S = 1.0
LIMIT_S = 5.0
SAMPLING = Sampling()


class Prompts:
    """A group is the number of its prompt."""

    def __init__(self) -> None:
        self.drawn = 0
        self.returned: deque[int] = deque()
        self.requests = 0
        self.versions: dict[int, int] = {}
        self._judged: list[int] = []

    def begin(self, count: int) -> list[tuple[Request, int]]:
        return [self._begin() for _ in range(count)]

    def _begin(self) -> tuple[Request, int]:
        if self.returned:
            prompt = self.returned.popleft()
        else:
            prompt, self.drawn = self.drawn, self.drawn + 1
        self.requests += 1
        return Request(self.requests, (), 1, SAMPLING, seed=0), prompt

    def judge(self, answered: list[tuple[int, Response]]) -> None:
        for prompt, response in answered:
            self.versions[prompt] = response.completions[0].policy_versions[0]
            self._judged.append(response.request_id)

    def judged(self, timeout: float) -> list[int]:
        judged, self._judged = self._judged, []
        return judged

    def replacement(self, group: int) -> tuple[Request, int] | None:
        return None


class Engines:
    """Simulated engines behind the real dispatch. `simulated_s`: CPU seconds spent on the simulation."""

    def __init__(self, count: int, seed: int) -> None:
        self.dispatch = Dispatch(window=GROUPS_PER_WORKER)
        self.chance = random.Random(seed)
        self.clock = 0.0
        self.version = 0
        self.killed = 0
        self.simulated_s = 0.0
        self.alive = list(range(count))
        self.next_engine = count
        self.events: list[
            tuple[float, int, int, int]
        ] = []  # (when, engine, request id or -1: starts, version)
        for engine in self.alive:
            self.dispatch.open(engine)

    def submit(self, request: Request) -> None:
        self.dispatch.submit(request)

    def step(self, timeout: float) -> list[Response]:
        """Whatever finishes next, up to `timeout` virtual seconds from now."""
        given = self.dispatch.assign(self.clock)
        began = time.thread_time()
        for engine, requests in given.items():
            for request in requests:
                takes = min(LIMIT_S, MEAN_S * self.chance.lognormvariate(-SIGMA * SIGMA / 2, SIGMA))
                heapq.heappush(self.events, (self.clock + takes, engine, request.request_id, self.version))
        limit, event = self.clock + timeout, None
        if self.events and self.events[0][0] <= limit:
            event = heapq.heappop(self.events)
        self.clock = limit if event is None else event[0]
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

    def kill_one(self) -> None:
        index = self.chance.randrange(len(self.alive))
        self.alive[index], self.alive[-1] = self.alive[-1], self.alive[index]
        self.dispatch.lost(self.alive.pop())
        heapq.heappush(self.events, (self.clock + RESTART_S, self.next_engine, -1, 0))
        self.next_engine += 1
        self.killed += 1


class Simulation:
    """One run: `workers` engines, a learner, `groups` groups consumed."""

    def __init__(self, workers: int, groups: int, max_age: int, stale: str, seed: int) -> None:
        self.batch = workers * GROUPS_PER_WORKER
        self.batches = max(1, groups // self.batch)
        self.max_age = max_age
        self.engines = Engines(workers, seed)
        self.prompts = Prompts()
        self.buffer: GroupBuffer[int] = GroupBuffer(
            self.batch, max_age, 1, capacity=2 * self.batch, keep_order=stale == "wait"
        )
        self.controller = Controller(self.engines, self.prompts, self.buffer, self.batch)
        self.consumed: list[int] = []
        self.most_held = 0
        self.cpu_s = 0.0
        self.oldest = 0

    def run(self) -> None:
        learner_free_at, learning = 0.0, False
        kills = max(1, round(KILLED_SHARE * len(self.engines.alive)))
        due = sorted(self.engines.chance.sample(range(1, self.batches * self.batch), kills))
        done = 0
        while done < self.batches:
            if learning and self.engines.clock >= learner_free_at:
                learning, done = False, done + 1
                self._push()
            if not learning and self._consume():
                learning, learner_free_at = True, self.engines.clock + MEAN_S
            while due and len(self.consumed) >= due[0] and self.engines.alive:
                due.pop(0)
                self.engines.kill_one()
            wait = learner_free_at - self.engines.clock if learning else 1.0
            self._turn(max(wait, 1e-9))

    def _turn(self, wait: float) -> None:
        simulated, began = self.engines.simulated_s, time.thread_time()
        self.controller.admit()
        if self.controller.groups_in_flight:
            self.controller.advance(wait)
        else:
            self.engines.clock += wait
        self.cpu_s += time.thread_time() - began - (self.engines.simulated_s - simulated)
        self.most_held = max(self.most_held, self.controller.groups_in_flight + self.buffer.ready)

    def _consume(self) -> bool:
        began = time.thread_time()
        batch = self.buffer.take_now(self.prompts.returned.append)
        self.cpu_s += time.thread_time() - began
        if batch is None:
            return False
        self.consumed += batch
        age = self.engines.version - min(self.prompts.versions.pop(group) for group in batch)
        assert age <= self.max_age, f"a group of age {age} was consumed"
        self.oldest = max(self.oldest, age)
        return True

    def _push(self) -> None:
        self.engines.version += 1
        self.buffer.pushed(self.engines.version)

    def check(self) -> None:
        """Nothing is lost and nothing comes twice."""
        accounted = self.consumed + self.controller.outstanding() + list(self.prompts.returned)
        assert len(accounted) == len(set(accounted)) == self.prompts.drawn, "a prompt is lost or doubled"
        assert set(accounted) == set(range(self.prompts.drawn))


def report(workers: int, simulation: Simulation, resident_mib: float) -> float:
    """Prints one row; returns microseconds a group."""
    groups = len(simulation.consumed)
    micros = simulation.cpu_s / groups * 1e6
    engines, buffer = simulation.engines, simulation.buffer
    busy = groups * MEAN_S / (engines.clock * workers * GROUPS_PER_WORKER)
    print(
        f"{workers:8d} {groups:8d} {micros:8.1f} {simulation.most_held:6d} {simulation.most_held / workers:10.1f} "
        f"{resident_mib:9.1f} {engines.killed:7d} {simulation.oldest:4d} {buffer.dropped:8d} {busy:7.2f}"
    )
    return micros


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--max-age", type=int, default=2)
    parser.add_argument(
        "--repeats", type=int, default=2, help="the fastest counts: the machine may be shared"
    )
    asked = parser.parse_args()
    process = psutil.Process()
    gc.freeze()  # what torch's import left behind is not collected again and again while the runs are timed
    for stale in ("wait", "drop"):
        print(f"train.stale_groups={stale}, train.max_policy_age={asked.max_age}")
        print(" workers   groups us/group   held held/worker  grew MiB  killed  age  dropped    busy")
        micros = []
        for workers in asked.workers:
            before = process.memory_info().rss
            runs = []
            for _ in range(asked.repeats):
                runs.append(Simulation(workers, asked.groups, asked.max_age, stale, seed=workers))
                runs[-1].run()
                runs[-1].check()
            fastest = min(runs, key=lambda run: run.cpu_s)
            micros.append(report(workers, fastest, (process.memory_info().rss - before) / 2**20))
        print(f"  slowest / fastest: {max(micros) / min(micros):.2f} (target <= 1.5)\n")


if __name__ == "__main__":
    main()
