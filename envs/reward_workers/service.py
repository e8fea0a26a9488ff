"""Reward service, which scores batches in worker processes with deadlines, or safe rewards in-process.

    submit ─▶ queue ─▶ batches ─▶ workers ─▶ results ─▶ verdicts ─▶ poll
                ▲                     │ worker lost: replaced
                ├── unfinished ───────┤
                └── probe ◀─ crash ◀──┘ the verification that ran is attributed (`crash_attribution`)

There are three outcomes. `scored`: the reward's verdict. `invalid`: the completion made the verifier hang, run out
of memory or crash, while the same example with an empty completion does not; or the completion has control tokens.
An invalid completion scores the declared minimum, or a lower score of `minimum_scores`. `error`: the reward or the
row is at fault. The learner masks such a completion, and above `env.max_error_rate` the run stops.
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
from envs.example import Completion, Example, as_completion_in_run, without_run_fields
from envs.group import Verdict
from envs.reward_workers.crash_attribution import CrashAttribution, RewardTicket, Verification
from envs.reward_workers.fork_server_process import ForkServerDied
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.reward_workers.scoring import ScoringResult, crash_result, score_completion
from envs.reward_workers.task_scorer import can_score_in_process, make_scorer, minimum_score
from envs.reward_workers.worker import IDLE
from envs.reward_workers.worker_pool import PROCESS_DIED, LostWorker, WorkerHandle, WorkerPool
from envs.rewards import reads_progress
from envs.task import Task

MAX_BATCH_SIZE = 128
BATCHES_AHEAD = 2
"""Batches that a worker holds at a time, so that the next batch is present when the first is done."""
STALLED_SECONDS = 60.0
MAX_EARLY_DEATHS = 8
"""Workers that may end in a row before they start a verification."""


class RewardService:
    """Scores batches of completions with the task's reward, or the rewards that `env.reward` names.

    Thread-safe: any thread may submit and wait.

    Args:
        step: returns the number of finished optimizer steps.
        total_steps: optimizer steps of the whole run. Rewards that read the progress of the run receive both.
    """

    def __init__(self, task: Task, env: EnvConfig, step: Callable[[], int] = lambda: 0, total_steps: int = 1) -> None:
        self.env, self.task, self.step, self.total_steps = env, task, step, total_steps
        self._reads_progress = any(reads_progress(each.env) for each in (task, *task.members.values()))
        self.scorer = make_scorer(task)
        self.num_workers = env.reward_workers or max(1, (os.cpu_count() or 2) - 1)
        self._lock = threading.RLock()
        self._verifications: dict[int, Verification] = {}
        self._queue: deque[int] = deque()
        self._next_index = 0
        self._crash_attribution = CrashAttribution(self._minimum_score)
        self._outcome_counts = OutcomeCounts(env.max_error_rate)
        self._pool = None if can_score_in_process(task) else WorkerPool(task, env.reward_memory_gib)
        self._last_progress_time = time.monotonic()
        self._early_deaths = 0

    @property
    def last_error(self) -> str:
        """Row and reason of the last error; empty before the first error."""
        return self._outcome_counts.last_error

    def submit(self, completions: Sequence[Completion], examples: Sequence[Example]) -> RewardTicket:
        """Queues a batch, and starts it if a worker is free. Raises as `poll` does."""
        ticket = RewardTicket([None] * len(completions), len(completions))
        inputs = [without_run_fields(one) for one in completions]
        if self._reads_progress:
            step, total = self.step(), self.total_steps
            inputs = [replace(as_completion_in_run(one), step=step, total_steps=total) for one in completions]
        with self._lock:
            for position, (completion, example) in enumerate(zip(inputs, examples, strict=True)):
                if completion.control_tokens:
                    result = ScoringResult(self._minimum_score(example), {"control_tokens": 1.0}, "invalid", 0.0)
                elif self._pool is None:
                    result = score_completion(self.scorer, completion, example)
                else:
                    self._enqueue(Verification(ticket, position, completion, example))
                    continue
                self._record_result(ticket, position, example, result)
            self._last_progress_time = time.monotonic()
            if self._pool is None:
                self._outcome_counts.check_error_rate()
            elif self._pool.is_ready():
                self._advance_queue(0.0)
        return ticket

    def poll(self, ticket: RewardTicket, timeout: float = 0.0) -> list[Verdict] | None:
        """Returns the verdicts in the order of the batch, or None while some are missing.

        timeout: seconds to wait for the verdicts.

        Raises:
            ConfigError: more verifications fail than `env.max_error_rate` allows, or workers end repeatedly before
                they score.
            DeadlineError: no worker has made progress.
        """
        deadline = time.monotonic() + timeout
        while ticket.num_missing:
            left = deadline - time.monotonic()
            with self._lock:
                self._advance_queue(max(0.0, min(left, 0.05)))
            if left <= 0 and ticket.num_missing:
                return None
        return [verdict for verdict in ticket.verdicts if verdict is not None]

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
        """Scores a batch, and waits for all verdicts."""
        return self.wait(self.submit(completions, examples))

    def wait(self, ticket: RewardTicket) -> list[Verdict]:
        """Waits for the verdicts of a batch, and returns them in order.

        Every verification has its own deadline. Raises as `poll` does.
        """
        while (verdicts := self.poll(ticket, timeout=1.0)) is None:
            continue
        return verdicts

    def metrics(self) -> dict[str, float]:
        """Returns latency percentiles of the last verifications in seconds, and counts of the run."""
        with self._lock:
            return self._outcome_counts.metrics()

    def close(self) -> None:
        """Ends all processes of the service."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()

    def _enqueue(self, item: Verification, first: bool = False) -> None:
        self._verifications[self._next_index] = item
        (self._queue.appendleft if first else self._queue.append)(self._next_index)
        self._next_index += 1

    def _advance_queue(self, timeout: float) -> None:
        """Sends batches to idle workers, receives results, and ends workers over their deadline."""
        assert self._pool is not None
        self._send_batches(self._pool)
        busy = {worker.connection: worker for worker in self._pool.workers if worker.num_batches}
        ready = wait(list(busy), timeout)
        for worker in self._pool.remaining_workers(busy[connection] for connection in ready):  # type: ignore[index]
            self._receive(self._pool, worker)
        patience = STALLED_SECONDS + self.env.reward_timeout_s
        for worker in self._pool.remaining_workers(list(self._pool.workers)):
            lost_worker = worker.describe_lost_worker(self._timeout_message)
            if lost_worker.running_index != IDLE and self._is_late(lost_worker.seconds):
                self._replace_worker(self._pool, worker, lost_worker)
            elif worker.num_batches and time.monotonic() - self._last_progress_time > patience:
                raise DeadlineError(
                    f"the reward service waited {time.monotonic() - self._last_progress_time:.0f} s for any of "
                    f"{len(self._pool.workers)} workers to score one of {len(self._verifications)} completions"
                )
        self._outcome_counts.check_error_rate()

    def _send_batches(self, pool: WorkerPool) -> None:
        while self._queue and len(pool.workers) < (
            1 if self._crash_attribution.needs_single_worker() else self.num_workers
        ):
            try:
                pool.add_worker()
            except ForkServerDied:
                self._handle_lost_workers([worker.describe_lost_worker(PROCESS_DIED) for worker in pool.workers])
                pool.restart()
        for worker in pool.remaining_workers(sorted(pool.workers, key=lambda worker: worker.num_batches)):
            if not self._queue:
                return
            if worker.num_batches < BATCHES_AHEAD:
                share = len(self._queue) // (BATCHES_AHEAD * len(pool.workers)) + 1
                batch = [self._queue.popleft() for _ in range(min(share, MAX_BATCH_SIZE, len(self._queue)))]
                items = [(index, self._verifications[index]) for index in batch]
                try:
                    if worker.send([(index, item.next_completion, item.example) for index, item in items]):
                        self._last_progress_time = time.monotonic()
                    else:
                        self._queue.extendleft(reversed(batch))
                except OSError:
                    self._replace_worker(pool, worker, worker.describe_lost_worker(PROCESS_DIED))

    def _receive(self, pool: WorkerPool, worker: WorkerHandle) -> None:
        try:
            results = worker.receive()
        except (EOFError, OSError):
            self._replace_worker(pool, worker, worker.describe_lost_worker(PROCESS_DIED))
            return
        self._last_progress_time = time.monotonic()
        self._early_deaths = 0
        for index, result in results:
            item = self._verifications.pop(index)
            # A result after its deadline counts as a crash, even if no earlier poll noticed the deadline.
            late = self._is_late(result.seconds)
            timely_result = crash_result(result.seconds, self._timeout_message) if late else result
            self._finish_verification(item, self._crash_attribution.resolve_result(item, timely_result))

    def _is_late(self, seconds: float) -> bool:
        return seconds > self.env.reward_timeout_s

    @property
    def _timeout_message(self) -> str:
        return f"scoring took longer than env.reward_timeout_s={self.env.reward_timeout_s:g}"

    def _replace_worker(self, pool: WorkerPool, worker: WorkerHandle, lost_worker: LostWorker) -> None:
        """Kills a worker and handles its loss."""
        lost_workers = [lost_worker]
        try:
            pool.remove_worker(worker)
        except ForkServerDied:
            lost_workers += [other.describe_lost_worker(PROCESS_DIED) for other in pool.workers]
            pool.restart()
        self._handle_lost_workers(lost_workers)

    def _handle_lost_workers(self, lost_workers: list[LostWorker]) -> None:
        """Attributes the running verifications of workers lost at one moment, and requeues the others."""
        self._outcome_counts.num_replaced_workers += sum(not lost_worker.has_retired for lost_worker in lost_workers)
        self._last_progress_time = time.monotonic()
        interrupted = [
            (lost_worker, self._verifications[lost_worker.running_index])
            for lost_worker in lost_workers
            if lost_worker.running_index != IDLE
        ]
        self._early_deaths += not any(
            lost_worker.has_sent_results or lost_worker.running_index != IDLE for lost_worker in lost_workers
        )
        if self._early_deaths > MAX_EARLY_DEATHS:
            raise ConfigError(
                f"env.reward_memory_gib={self.env.reward_memory_gib:g}: {self._early_deaths} times in a row "
                "reward workers ended before they scored a completion; raise env.reward_memory_gib if the "
                "reward's imports and its rows need more"
            )
        self._crash_attribution.record_lost_workers([item for _, item in interrupted])
        for lost_worker in lost_workers:
            for index in reversed(lost_worker.pending_indices):
                if index != lost_worker.running_index:
                    self._enqueue(self._verifications.pop(index), first=True)
        for lost_worker, item in interrupted:
            del self._verifications[lost_worker.running_index]
            self._finish_verification(
                item, self._crash_attribution.resolve_lost_worker(item, lost_worker, only_loss=len(interrupted) == 1)
            )

    def _finish_verification(self, item: Verification, result: ScoringResult | None) -> None:
        """Records the result of a verification; without a result, requeues it as the next."""
        if result is None:
            self._enqueue(item, first=True)
            return
        self._record_result(item.ticket, item.position, item.example, result)

    def _record_result(self, ticket: RewardTicket, position: int, example: Example, result: ScoringResult) -> None:
        if result.outcome == "invalid":
            result = result._replace(score=min(result.score, self._minimum_score(example)))
        ticket.verdicts[position] = result.verdict()
        ticket.num_missing -= 1
        self._outcome_counts.add(example, result)

    def _minimum_score(self, example: Example) -> float:
        return minimum_score(self.task.members.get(example.source, self.task))
