"""Where completions are judged: in worker processes that a deadline ends, so that no reward can hang or lie.

    submit ─▶ queue ─▶ batches ─▶ workers ─▶ verdicts ─▶ poll
                          ▲            │ hangs or dies: killed, replaced
                          └── the rest ┘ its verification is probed: whose fault was it?

Three outcomes. `scored`: the verdict. `invalid`: the completion made the verifier hang, run out of memory or crash,
and the same example with an empty completion does not; or it holds control tokens. It scores the minimum. `error`: the
reward or the row is at fault: masked by whoever trains, counted, and above `env.max_error_rate` the run stops.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import numpy as np

from config.env import EnvConfig
from config.errors import ConfigError, DeadlineError
from envs.group import Verdict as Scored
from envs.judging.pool import NurseryDied, Pool, Worker
from envs.judging.worker import CRASHED, IDLE, Judge, Verdict, judged_here
from envs.rewards import judges_in_process, least_score
from envs.task import Completion, Example, Task

LARGEST_BATCH = 128
BATCHES_AHEAD = 2
"""Batches that a worker has at a time: the next one is there when it finishes the first."""
WINDOW = 1000
"""Verifications over which the error rate and the latencies are taken."""
FEWEST = 100
"""It is taken as if at least so many had been judged: one early error does not stop a run."""
STALLED_SECONDS = 60.0
MOST_EARLY_DEATHS = 8
"""Workers that may end in a row without a verdict and before they have begun anything."""
EMPTY = Completion("")
DIED = "its process died"


@dataclass(frozen=True)
class _Loss:
    """What a lost worker ran (or IDLE), for how many seconds, what it had not answered, and why it was lost."""

    running: int
    seconds: float
    unanswered: list[int]
    reason: str

    @classmethod
    def of(cls, worker: Worker, reason: str) -> "_Loss":
        """One reading, since the worker may go on to its next verification before it is ended."""
        return cls(*worker.running(), list(worker.unanswered), reason)


@dataclass
class Ticket:
    """A submitted batch: verdicts arrive in any order."""

    scored: list[Scored | None]
    missing: int


@dataclass(slots=True, eq=False)
class _Item:
    """One verification.

    killed_after: seconds that the attempt took that had to be killed, once one had.
    deaths: workers that died over it and nothing else, through no deadline: once may be an accident.
    """

    ticket: Ticket
    position: int
    completion: Completion
    example: Example
    killed_after: float | None = None
    message: str = ""
    deaths: int = 0


@dataclass
class _Counts:
    judged: int = 0
    invalid: int = 0
    errors: int = 0
    replaced: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class RewardService:
    """Judges batches of completions with the task's reward, or the one that `env.reward` names.

    Thread-safe: any thread may submit and wait.
    """

    def __init__(self, task: Task, env: EnvConfig) -> None:
        self.env = env
        self.task = task
        self.judge = Judge(task)
        self.num_workers = env.reward_workers or max(1, (os.cpu_count() or 2) - 1)
        self._counts = _Counts()
        self._lock = threading.RLock()
        self._items: dict[int, _Item] = {}
        self._queue: deque[int] = deque()
        self._next = 0
        self.last_error = ""
        self._suspects: set[_Item] = set()
        self._at_fault: dict[tuple[str, int], str] = {}
        self._pool = None if _in_process(task) else Pool(task, env.reward_memory_gib)
        self._progressed = time.monotonic()
        self._early_deaths = 0

    def submit(self, completions: Sequence[Completion], examples: Sequence[Example]) -> Ticket:
        """Queue a batch, and begin it where a worker is free; `poll` says when it is done. Raises as `poll`."""
        pairs = list(zip(completions, examples, strict=True))
        ticket = Ticket([None] * len(pairs), len(pairs))
        with self._lock:
            for position, (completion, example) in enumerate(pairs):
                item = _Item(ticket, position, completion, example)
                if completion.control_tokens:
                    self._finish(
                        item, (0, self._minimum(example), {"control_tokens": 1.0}, "invalid", 0.0, "")
                    )
                elif self._pool is None:
                    self._finish(item, judged_here(self.judge, 0, completion, example))
                else:
                    self._enqueue(item)
            self._progressed = time.monotonic()
            if self._pool is None:
                self._check_error_rate()
            elif self._pool.is_ready():
                self._advance(0.0)
        return ticket

    def poll(self, ticket: Ticket, timeout: float = 0.0) -> list[Scored] | None:
        """The verdicts in the order of the batch, or None while some are missing.

        timeout: seconds to wait for them.

        Raises:
            ConfigError: more verifications fail than `env.max_error_rate` allows.
        """
        deadline = time.monotonic() + timeout
        while ticket.missing:
            left = deadline - time.monotonic()
            with self._lock:
                self._advance(max(0.0, min(left, 0.05)))
            if left <= 0 and ticket.missing:
                return None
        return [scored for scored in ticket.scored if scored is not None]

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Scored]:
        """Judge a batch and wait for all of it."""
        return self.wait(self.submit(completions, examples))

    def wait(self, ticket: Ticket) -> list[Scored]:
        """The verdicts in the order of the batch. Raises as `poll`; every verification has its own deadline."""
        while True:
            scored = self.poll(ticket, timeout=1.0)
            if scored is not None:
                return scored

    def metrics(self) -> dict[str, float]:
        """Latency percentiles in seconds over the last `WINDOW` verifications, and counts of the whole run."""
        with self._lock:
            seconds = list(self._counts.seconds) or [0.0]
            counts = self._counts
        shares = (50, 95, 99)
        latencies = np.percentile(seconds, shares, method="higher").tolist()
        percentiles = {
            f"reward_latency/p{share}_s": value for share, value in zip(shares, latencies, strict=True)
        }
        return percentiles | {
            "reward/invalid_total": float(counts.invalid),
            "reward/errors_total": float(counts.errors),
            "reward/workers_replaced": float(counts.replaced),
        }

    def close(self) -> None:
        """No process is left afterwards."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()

    def _enqueue(self, item: _Item, first: bool = False) -> None:
        self._items[self._next] = item
        (self._queue.appendleft if first else self._queue.append)(self._next)
        self._next += 1

    def _advance(self, timeout: float) -> None:
        """Give idle workers work, take what is ready, end what is over its deadline."""
        assert self._pool is not None
        self._give(self._pool)
        busy = {worker.connection: worker for worker in self._pool.workers if worker.batches}
        ready = wait(list(busy), timeout)
        for worker in self._pool.present(busy[connection] for connection in ready):  # type: ignore[index]
            self._take(self._pool, worker)
        for worker in self._pool.present(list(self._pool.workers)):
            self._check_deadline(self._pool, worker)
        self._check_error_rate()

    def _give(self, pool: Pool) -> None:
        while self._queue and len(pool.workers) < (1 if self._suspects else self.num_workers):
            try:
                pool.add_worker()
            except NurseryDied:
                self._hand_back([_Loss.of(worker, DIED) for worker in pool.workers])
                pool.restart()
        for worker in pool.present(sorted(pool.workers, key=lambda worker: worker.batches)):
            if not self._queue:
                return
            if worker.batches < BATCHES_AHEAD:
                share = len(self._queue) // (BATCHES_AHEAD * len(pool.workers)) + 1
                batch = [self._queue.popleft() for _ in range(min(share, LARGEST_BATCH, len(self._queue)))]
                self._hand_over(pool, worker, batch)

    def _hand_over(self, pool: Pool, worker: Worker, batch: list[int]) -> None:
        self._progressed = time.monotonic()
        try:
            if not worker.give([(index, *self._attempt(self._items[index])) for index in batch]):
                self._queue.extendleft(reversed(batch))
        except OSError:
            self._replace(pool, worker, _Loss.of(worker, DIED))

    def _attempt(self, item: _Item) -> tuple[Completion, Example]:
        """What is judged: after a kill, the same example with nothing to say, to learn whose fault it was."""
        return (item.completion if item.killed_after is None else EMPTY), item.example

    def _take(self, pool: Pool, worker: Worker) -> None:
        try:
            verdicts = worker.take()
        except (EOFError, OSError):
            self._replace(pool, worker, _Loss.of(worker, DIED))
            return
        self._progressed = time.monotonic()
        self._early_deaths = 0
        for verdict in verdicts:
            self._received(self._items.pop(verdict[0]), self._in_time(verdict))

    def _in_time(self, verdict: Verdict) -> Verdict:
        """One that came after its deadline counts as none, whether or not anybody looked meanwhile."""
        index, *_, seconds, _ = verdict
        return (index, 0.0, {}, CRASHED, seconds, self._too_late) if self._is_late(seconds) else verdict

    def _is_late(self, seconds: float) -> bool:
        return seconds > self.env.reward_timeout_s

    @property
    def _too_late(self) -> str:
        return f"it took longer than env.reward_timeout_s={self.env.reward_timeout_s:g}"

    def _check_deadline(self, pool: Pool, worker: Worker) -> None:
        patience = STALLED_SECONDS + self.env.reward_timeout_s
        now = _Loss.of(worker, self._too_late)
        if now.running != IDLE and self._is_late(now.seconds):
            self._replace(pool, worker, now)
        elif worker.batches and time.monotonic() - self._progressed > patience:
            raise DeadlineError(
                f"the reward service waited {time.monotonic() - self._progressed:.0f} s for any of "
                f"{len(pool.workers)} workers to judge one of {len(self._items)} completions"
            )

    def _replace(self, pool: Pool, worker: Worker, loss: _Loss) -> None:
        """Kill a worker; whatever it was judging is probed, the rest of its batch goes back to the queue."""
        lost = [loss]
        try:
            pool.remove_worker(worker)
        except NurseryDied:
            lost += [_Loss.of(other, DIED) for other in pool.workers]
            pool.restart()
        self._hand_back(lost)

    def _hand_back(self, lost: list[_Loss]) -> None:
        """What lost workers leave: the verification that ran is at fault, all others go back to the queue.

        Where several ran, one of them may have taken the others with it: all are suspects, and until the last of
        them is judged, one worker judges alone.
        """
        self._counts.replaced += len(lost)
        self._progressed = time.monotonic()
        running = [self._items[loss.running] for loss in lost if loss.running != IDLE]
        self._early_deaths += not running
        if self._early_deaths > MOST_EARLY_DEATHS:
            raise ConfigError(
                f"{self._early_deaths} times in a row reward workers ended before they judged anything; is "
                f"env.reward_memory_gib={self.env.reward_memory_gib:g} enough for the reward's imports and its rows?"
            )
        if len(running) > 1:
            self._suspects.update(running)
        for loss in lost:
            for index in reversed(loss.unanswered):
                if index != loss.running:
                    self._enqueue(self._items.pop(index), first=True)
        for loss in lost:
            if loss.running != IDLE:
                item = self._items.pop(loss.running)
                item.deaths += loss.reason == DIED and len(running) == 1
                if loss.reason != DIED or item.deaths > 1:
                    self._received(item, (loss.running, 0.0, {}, CRASHED, loss.seconds, loss.reason))
                else:
                    self._enqueue(item, first=True)

    def _received(self, item: _Item, verdict: Verdict) -> None:
        _, _, _, outcome, seconds, message = verdict
        key = (item.example.source, item.example.row)
        if item.killed_after is not None:
            failed = outcome in (CRASHED, "error")
            self._at_fault[key] = (
                f"{item.message}; so it is with an empty completion ({message})" if failed else ""
            )
            self._settle(item, self._at_fault[key], item.killed_after)
        elif outcome != CRASHED:
            self._finish(item, verdict)
        elif key in self._at_fault:
            self._settle(item, self._at_fault[key], seconds)
        else:
            item.killed_after, item.message, item.deaths = seconds, message, 0
            self._enqueue(item, first=True)

    def _settle(self, item: _Item, fault: str, seconds: float) -> None:
        """The verdict on a verification that crashed: an error where the example is at fault, else invalid."""
        outcome = "error" if fault else "invalid"
        self._finish(item, (0, self._minimum(item.example), {}, outcome, seconds, fault))

    def _minimum(self, example: Example) -> float:
        return least_score(self.task.members.get(example.source, self.task))

    def _finish(self, item: _Item, verdict: Verdict) -> None:
        _, score, parts, outcome, seconds, message = verdict
        assert outcome in ("scored", "invalid", "error")
        scored = Scored(score, parts, outcome, seconds)  # type: ignore[arg-type]
        item.ticket.scored[item.position] = scored
        item.ticket.missing -= 1
        self._suspects.discard(item)
        counts = self._counts
        counts.judged += 1
        counts.invalid += outcome == "invalid"
        counts.errors += outcome == "error"
        counts.recent.append(outcome == "error")
        counts.seconds.append(seconds)
        if outcome == "error":
            source = f"{item.example.source} " if item.example.source else ""
            self.last_error = f"{source}row {item.example.row}: {message}"

    def _check_error_rate(self) -> None:
        recent = self._counts.recent
        rate = sum(recent) / max(len(recent), FEWEST)
        if rate > self.env.max_error_rate:
            raise ConfigError(
                f"{sum(recent)} of the last {len(recent)} verifications failed through no fault of the model, above "
                f"env.max_error_rate={self.env.max_error_rate}. The last: {self.last_error}. Mend the row or the "
                "reward, or raise env.max_error_rate"
            )


def _in_process(task: Task) -> bool:
    if task.members:
        return all(_in_process(member) for member in task.members.values())
    return judges_in_process(task)
