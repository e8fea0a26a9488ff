"""Service that judges completions in worker processes, which a deadline ends.

    submit ─▶ queue ─▶ batches ─▶ workers ─▶ results ─▶ verdicts ─▶ poll
                ▲                    │ worker lost: replaced
                ├── unanswered ──────┤
                └── probe ── blame ◀─┘ the verification that ran: whose fault was it?

Three outcomes. `scored`: the verdict. `invalid`: the completion made the verifier hang, run out of memory or crash,
and the same example with an empty completion does not; or it holds control tokens. It scores the minimum, or what
`lowest_scores` knows below that. `error`: the reward or the row is at fault: masked by whoever trains, counted, and
above `env.max_error_rate` the run stops.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError, DeadlineError
from envs.example import Completion, Example, in_run, without_run
from envs.group import Verdict
from envs.judging.blame import Blame, Ticket, Verification
from envs.judging.judge import judges_in_process, least_score, make_judge
from envs.judging.outcome import Result, crashed, judged
from envs.judging.pool import DIED, ForkServerDied, LostWorker, Pool, Worker
from envs.judging.tally import Tally
from envs.judging.worker import IDLE
from envs.rewards import reads_progress
from envs.task import Task

LARGEST_BATCH = 128
BATCHES_AHEAD = 2
"""Batches that a worker has at a time: the next one is there when it finishes the first."""
STALLED_SECONDS = 60.0
MOST_EARLY_DEATHS = 8
"""Workers that may end in a row without a result and before they have begun anything."""


class RewardService:
    """Judges batches of completions with the task's reward, or the one that `env.reward` names.

    Thread-safe: any thread may submit and wait.

    step: optimizer steps that are done. total_steps: of the whole run. Rewards are told of both if they ask.
    """

    def __init__(
        self, task: Task, env: EnvConfig, step: Callable[[], int] = lambda: 0, total_steps: int = 1
    ) -> None:
        self.env, self.task, self.step, self.total_steps = env, task, step, total_steps
        self._reads_progress = any(reads_progress(each.env) for each in (task, *task.members.values()))
        self.judge = make_judge(task)
        self.num_workers = env.reward_workers or max(1, (os.cpu_count() or 2) - 1)
        self._lock = threading.RLock()
        self._items: dict[int, Verification] = {}
        self._queue: deque[int] = deque()
        self._next = 0
        self._blame = Blame(self._least_score)
        self._tally = Tally(env.max_error_rate)
        self._pool = None if judges_in_process(task) else Pool(task, env.reward_memory_gib)
        self._progressed = time.monotonic()
        self._early_deaths = 0

    @property
    def last_error(self) -> str:
        """Row and reason of the last error; empty before there is one."""
        return self._tally.last_error

    def submit(self, completions: Sequence[Completion], examples: Sequence[Example]) -> Ticket:
        """Queue a batch, and begin it where a worker is free; `poll` says when it is done. Raises as `poll`."""
        ticket = Ticket([None] * len(completions), len(completions))
        known = [without_run(one) for one in completions]
        if self._reads_progress:
            step, total = self.step(), self.total_steps
            known = [replace(in_run(one), step=step, total_steps=total) for one in completions]
        with self._lock:
            for position, (completion, example) in enumerate(zip(known, examples, strict=True)):
                if completion.control_tokens:
                    result = Result(self._least_score(example), {"control_tokens": 1.0}, "invalid", 0.0)
                elif self._pool is None:
                    result = judged(self.judge, completion, example)
                else:
                    self._enqueue(Verification(ticket, position, completion, example))
                    continue
                self._answer(ticket, position, example, result)
            self._progressed = time.monotonic()
            if self._pool is None:
                self._tally.check_error_rate()
            elif self._pool.is_ready():
                self._advance(0.0)
        return ticket

    def poll(self, ticket: Ticket, timeout: float = 0.0) -> list[Verdict] | None:
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
        return [verdict for verdict in ticket.verdicts if verdict is not None]

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
        """Judge a batch and wait for all of it."""
        return self.wait(self.submit(completions, examples))

    def wait(self, ticket: Ticket) -> list[Verdict]:
        """The verdicts in the order of the batch. Raises as `poll`; every verification has its own deadline."""
        while (verdicts := self.poll(ticket, timeout=1.0)) is None:
            continue
        return verdicts

    def metrics(self) -> dict[str, float]:
        """Latency percentiles in seconds over the last verifications, and counts of the whole run."""
        with self._lock:
            return self._tally.metrics()

    def close(self) -> None:
        """No process is left afterwards."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()

    def _enqueue(self, item: Verification, first: bool = False) -> None:
        self._items[self._next] = item
        (self._queue.appendleft if first else self._queue.append)(self._next)
        self._next += 1

    def _advance(self, timeout: float) -> None:
        """Give idle workers work, take what is ready, end what is over its deadline."""
        assert self._pool is not None
        self._send_batches(self._pool)
        busy = {worker.connection: worker for worker in self._pool.workers if worker.batches}
        ready = wait(list(busy), timeout)
        for worker in self._pool.present(busy[connection] for connection in ready):  # type: ignore[index]
            self._receive(self._pool, worker)
        patience = STALLED_SECONDS + self.env.reward_timeout_s
        for worker in self._pool.present(list(self._pool.workers)):
            now = worker.lost(self._too_late)
            if now.running != IDLE and self._is_late(now.seconds):
                self._replace(self._pool, worker, now)
            elif worker.batches and time.monotonic() - self._progressed > patience:
                raise DeadlineError(
                    f"the reward service waited {time.monotonic() - self._progressed:.0f} s for any of "
                    f"{len(self._pool.workers)} workers to judge one of {len(self._items)} completions"
                )
        self._tally.check_error_rate()

    def _send_batches(self, pool: Pool) -> None:
        while self._queue and len(pool.workers) < (1 if self._blame.one_at_a_time() else self.num_workers):
            try:
                pool.add_worker()
            except ForkServerDied:
                self._workers_lost([worker.lost(DIED) for worker in pool.workers])
                pool.restart()
        for worker in pool.present(sorted(pool.workers, key=lambda worker: worker.batches)):
            if not self._queue:
                return
            if worker.batches < BATCHES_AHEAD:
                share = len(self._queue) // (BATCHES_AHEAD * len(pool.workers)) + 1
                batch = [self._queue.popleft() for _ in range(min(share, LARGEST_BATCH, len(self._queue)))]
                items = [(index, self._items[index]) for index in batch]
                try:
                    if worker.send([(index, item.judged_next, item.example) for index, item in items]):
                        self._progressed = time.monotonic()
                    else:
                        self._queue.extendleft(reversed(batch))
                except OSError:
                    self._replace(pool, worker, worker.lost(DIED))

    def _receive(self, pool: Pool, worker: Worker) -> None:
        try:
            results = worker.receive()
        except (EOFError, OSError):
            self._replace(pool, worker, worker.lost(DIED))
            return
        self._progressed = time.monotonic()
        self._early_deaths = 0
        for index, result in results:
            item = self._items.pop(index)
            # One that came after its deadline counts as none, whether or not anybody looked meanwhile.
            late = self._is_late(result.seconds)
            in_time = crashed(result.seconds, self._too_late) if late else result
            self._finish(item, self._blame.of_result(item, in_time))

    def _is_late(self, seconds: float) -> bool:
        return seconds > self.env.reward_timeout_s

    @property
    def _too_late(self) -> str:
        return f"it took longer than env.reward_timeout_s={self.env.reward_timeout_s:g}"

    def _replace(self, pool: Pool, worker: Worker, loss: LostWorker) -> None:
        """Kill a worker. `blame` decides on what it was judging; the rest of its batch goes back to the queue."""
        lost = [loss]
        try:
            pool.remove_worker(worker)
        except ForkServerDied:
            lost += [other.lost(DIED) for other in pool.workers]
            pool.restart()
        self._workers_lost(lost)

    def _workers_lost(self, lost: list[LostWorker]) -> None:
        """Workers were lost at one moment: what each ran is decided on, all else goes back to the queue."""
        self._tally.replaced += sum(not loss.retired for loss in lost)
        self._progressed = time.monotonic()
        ran = [(loss, self._items[loss.running]) for loss in lost if loss.running != IDLE]
        self._early_deaths += not any(loss.judged or loss.running != IDLE for loss in lost)
        if self._early_deaths > MOST_EARLY_DEATHS:
            raise ConfigError(
                f"{self._early_deaths} times in a row reward workers ended before they judged anything; is "
                f"env.reward_memory_gib={self.env.reward_memory_gib:g} enough for the reward's imports and its rows?"
            )
        self._blame.workers_lost([item for _, item in ran])
        for loss in lost:
            for index in reversed(loss.unanswered):
                if index != loss.running:
                    self._enqueue(self._items.pop(index), first=True)
        for loss, item in ran:
            del self._items[loss.running]
            self._finish(item, self._blame.of_lost_worker(item, loss, alone=len(ran) == 1))

    def _finish(self, item: Verification, result: Result | None) -> None:
        """Finish a verification; where it has no result yet, it is the next to be judged."""
        if result is None:
            self._enqueue(item, first=True)
            return
        self._answer(item.ticket, item.position, item.example, result)

    def _answer(self, ticket: Ticket, position: int, example: Example, result: Result) -> None:
        if result.outcome == "invalid":
            result = result._replace(score=min(result.score, self._least_score(example)))
        ticket.verdicts[position] = result.verdict()
        ticket.missing -= 1
        self._tally.add(example, result)

    def _least_score(self, example: Example) -> float:
        return least_score(self.task.members.get(example.source, self.task))
