"""Asyncio loop that runs coroutines, engine steps and reward polls, optionally in its own thread.

One thread drives the loop: the caller's thread, or a thread that the loop starts.

    groups (tasks)                          pump (a task), turn by turn while anything is pending
    ──────────────                          ─────────────────────────────────────────────────────
    start, continue ◀───────────────────    before_step, then the groups that it started
    await generate(request) ── submit ──▶   engine.step          waits 0.05 s at most for a response, or 0.002 s
                            ◀─ tokens ───   the group continues before the next step
    a cancelled generate ────── cancel ──▶  the request leaves the engine before the next step
    await scorer(completions) ─ submit ─▶   reward services      polled; waits 0.05 s at most if the engine is idle
                            ◀─ verdicts ─   the group continues before the next step
    await anything else (a tool, HTTP) ◀─   runs between two steps, which are short while it waits in `outside_engine`;
                                            with nothing pending, no pump runs before a submit or a wake-up

    in lockstep                             in overlap
    ───────────                             ──────────
    run(coroutine) drives the loop          `with loop.thread():` a thread drives the loop while the block runs
    call(function) calls the function       run, call: from another thread, which waits; a call runs between two steps

The thread of overlap.  consumes: calls, coroutines.  waits for: the engine (one step), a verdict, a tool, or a wake-up.
unblocked by: any response or verdict, `run`, `call`, `wake`.  `run` and `call` raise a failure of this thread with its
traceback, and `on_failure` receives the failure. A task group that fails counts with its first failure.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from typing import Any, TypeVar

from config.schema.errors import DeadlineError
from envs.group import SampledCompletion, Verdict
from envs.reward_workers.crash_attribution import RewardTicket
from envs.reward_workers.group_reward import CompletionScorer
from envs.reward_workers.service import RewardService
from envs.task import Completion, Example
from torchgrpo.rollout.engine_idle_clock import EngineIdleClock
from torchgrpo.rollout.engine_thread import start_engine_thread
from torchgrpo.rollout.engines.interface import Request, SteppedEngine

Result = TypeVar("Result")
log = logging.getLogger(__name__)
_STEP_TIMEOUT_S = 0.05
_SHORT_STEP_TIMEOUT_S = 0.002
"""Timeout of a step while a task waits outside the engine, since the step blocks the whole loop."""
_TASK_CHAIN_LENGTH = 4
"""Tasks that await one another, such as a timeout around a task group, each of which needs a turn of asyncio."""
_CHECK_INTERVAL_S = 0.5
_STOP_TIMEOUT_S = 30.0


class EngineLoop:
    """Async sampler over a stepped engine, with async scorers over polled reward services.

    Args:
        timeout: seconds in which the engine must finish a request while any is in flight.
        wait_timeout: seconds that a call may wait for the thread.
    """

    def __init__(self, engine: SteppedEngine, timeout: float, wait_timeout: float) -> None:
        self.engine = engine
        self.timeout = timeout
        self.wait_timeout = wait_timeout
        self.idle_clock = EngineIdleClock()
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.before_step: Callable[[], None] = lambda: None
        self.on_close = AsyncExitStack()
        self._request_ids = count()
        self._pending_requests: dict[int, asyncio.Future[list[SampledCompletion]]] = {}
        self._pending_scores: dict[asyncio.Future[list[Verdict]], tuple[RewardService, RewardTicket]] = {}
        self._num_outside = 0
        self._last_progress = 0.0
        self._loop = asyncio.new_event_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        self._pump_task: asyncio.Task[None] | None = None
        self._wake_requested = False
        self._is_closing = False  # then no pump starts
        self._loop.call_soon(self._resume)

    # -- for groups, in the loop

    async def generate(self, request: Request) -> list[SampledCompletion]:
        """Generates the completions of one request, as `Sampler.generate`.

        The engine receives the request under an id of the loop, so that callers' ids need not be unique. If the caller
        is cancelled, the engine drops the request.
        """
        request_id = next(self._request_ids)
        self.engine.submit(Request(request_id, request.prompt, request.n, request.sampling, request.seed))
        if not self._pending_requests:
            self._last_progress = time.monotonic()
            self.idle_clock.end()
        answer: asyncio.Future[list[SampledCompletion]] = self._loop.create_future()
        self._pending_requests[request_id] = answer
        self._resume()
        try:
            return await answer
        except asyncio.CancelledError:
            if not self._failure.done():  # a failed engine is not called again
                self.engine.cancel(request_id)
            raise
        finally:
            del self._pending_requests[request_id]

    @contextmanager
    def outside_engine(self) -> Iterator[None]:
        """Marks a wait for a timer, a tool, HTTP or a thread.

        While any such wait is open, a step of a pool blocks the loop for at most 2 ms, and tasks whose timers are due
        continue before the next step.
        """
        self._num_outside += 1
        try:
            yield
        finally:
            self._num_outside -= 1

    def make_scorer(self, reward_service: RewardService) -> CompletionScorer:
        """Returns an async scorer that awaits the verdicts of this reward service."""

        async def score_completions(completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
            ticket = reward_service.submit(completions, examples)
            if not ticket.num_missing:
                verdicts = reward_service.poll(ticket)
                assert verdicts is not None
                return list(verdicts)
            answer: asyncio.Future[list[Verdict]] = self._loop.create_future()
            self._pending_scores[answer] = reward_service, ticket
            self._resume()
            try:
                return await answer
            finally:
                del self._pending_scores[answer]

        return score_completions

    def spawn(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a background task; its failure fails everything that the loop runs."""
        task = self._loop.create_task(begin())
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            error = _first_failure(error)
            self._failure.set_exception(error)
            self._failure.exception()  # marks the exception as retrieved, else asyncio logs an error
            self.on_failure(error)

    def _resume(self) -> None:
        """Starts the pump, or makes a running pump take at least one more turn."""
        self._wake_requested = True
        if self._pump_task is None and not self._is_closing:
            self._pump_task = self._loop.create_task(self._pump())

    async def _pump(self) -> None:
        """Steps the engine and polls the reward services, turn by turn, while anything is pending."""
        try:
            while self._wake_requested or self._pending_requests or self._pending_scores:
                self._wake_requested = False
                self.before_step()
                await self._run_other_tasks()
                timeout = _SHORT_STEP_TIMEOUT_S if self._num_outside else _STEP_TIMEOUT_S
                if self._pending_requests:
                    answered = self._step(timeout) | self._poll(0.0)
                else:
                    self.idle_clock.begin()
                    answered = self._poll(timeout)
                if answered:
                    await asyncio.sleep(0)  # finished groups free their room before `before_step` runs
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._fail(error)  # no other pump will run
        else:
            self.idle_clock.begin()
            self._pump_task = None

    async def _run_other_tasks(self) -> None:
        """Lets tasks run that can continue, and in `outside_engine` those with due timers."""
        # Tasks that can continue precede the pump in asyncio's queue: new groups submit their requests now.
        await asyncio.sleep(0)
        if not self._num_outside:
            return
        # asyncio puts tasks with due timers behind the tasks that can continue, and so behind the pump. A timer of the
        # pump's own is the last of the due ones.
        last_timer = asyncio.Event()
        self._loop.call_later(0, last_timer.set)
        await last_timer.wait()
        for _ in range(_TASK_CHAIN_LENGTH):
            await asyncio.sleep(0)

    def _step(self, timeout: float) -> bool:
        """Steps the engine once; returns whether any request finished."""
        responses = self.engine.step(timeout)
        now = time.monotonic()
        if responses:
            self._last_progress = now
        elif now - self._last_progress > self.timeout:
            raise DeadlineError(
                f"the rollout waited {self.timeout:.0f} s (inference_model.request_timeout_s) for the engine to "
                f"finish any of {len(self._pending_requests)} requests"
            )
        for response in responses:
            answer = self._pending_requests.get(response.request_id)
            if answer is not None and not answer.done():
                answer.set_result(response.completions)
        return bool(responses)

    def _poll(self, timeout: float) -> bool:
        """Polls the reward services for at most `timeout` seconds; returns whether any batch was scored."""
        services = {
            id(reward_service): (reward_service, ticket) for reward_service, ticket in self._pending_scores.values()
        }
        for reward_service, ticket in services.values():
            reward_service.poll(ticket, timeout)
            timeout = 0.0
        came = False
        for answer, (reward_service, ticket) in self._pending_scores.items():
            verdicts = None if ticket.num_missing else reward_service.poll(ticket)
            if verdicts is not None and not answer.done():
                answer.set_result(list(verdicts))
                came = True
        return came

    # -- for the thread that drives the loop, or for another thread while the loop's own thread runs

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the loop and returns its result.

        Raises:
            DeadlineError: the thread did not respond for `wait_timeout` seconds.
            BaseException: the failure of the coroutine, an engine, a reward service or a spawned task.
        """
        if self._thread is None:
            return self._loop.run_until_complete(self._run_until_failure(coroutine))
        future = asyncio.run_coroutine_threadsafe(self._run_until_failure(coroutine), self._loop)
        try:
            while True:
                try:
                    return future.result(_CHECK_INTERVAL_S)
                except TimeoutError:  # raised by the wait or by the coroutine itself
                    if future.done():
                        return future.result()
                    self.call(lambda: None)
        finally:
            future.cancel()

    def run_all(self, coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Runs coroutines concurrently and returns their results in order; raises as `run`."""

        async def run_together() -> list[Result]:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(coroutine) for coroutine in coroutines]
            return [task.result() for task in tasks]

        return self.run(run_together())

    async def _run_until_failure(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Awaits the coroutine, and cancels the coroutine when anything else in the loop fails."""
        task = self._loop.create_task(coroutine)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        self._raise_failure()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise _first_failure(error)
        return task.result()

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` between two engine steps, where engines may be used, and returns its result.

        Raises:
            DeadlineError: the thread did not run the function in time.
            BaseException: the failure of the function or of the thread.
        """
        if self._thread is None:
            return self._run_in_loop(function)
        future: Future[Result] = Future()

        def run_and_report() -> None:
            try:
                future.set_result(self._run_in_loop(function))
            except BaseException as error:
                future.set_exception(error)

        self._raise_failure()
        self._loop.call_soon_threadsafe(run_and_report)
        deadline = time.monotonic() + self.wait_timeout
        while not future.done():
            self._raise_failure()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the learner waited {self.wait_timeout:.0f} s (train.wait_timeout_s) for the rollout thread, "
                    f"which is in an engine step or a reward with {len(self._pending_requests)} requests in flight"
                )
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                continue
        return future.result()

    def _raise_failure(self) -> None:
        """Raises the failure of the loop, if any."""
        if self._failure.done():
            self._failure.result()

    def _run_in_loop(self, function: Callable[[], Result]) -> Result:
        """Runs a function in the loop's thread.

        Its seconds count neither against the engine's deadline nor as idle.
        """
        began = time.monotonic()
        with self.idle_clock.pause():
            try:
                return function()
            finally:
                self._last_progress += time.monotonic() - began

    def wake(self) -> None:
        """Schedules a call of `before_step`; safe from any thread."""
        self._loop.call_soon_threadsafe(self._resume)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Drives the loop in a thread during the block, which also ends spawned tasks.

        Raises:
            DeadlineError: the thread does not end, and the block raised no exception.
        """
        self._thread = start_engine_thread(self._loop.run_forever, "rollouts")
        raised = True
        try:
            yield
            raised = False
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_TIMEOUT_S)
            hangs, self._thread = self._thread.is_alive(), None
            if not hangs:
                self._end(lambda: self._tasks)
            elif not raised:
                raise DeadlineError(
                    f"the run waited {_STOP_TIMEOUT_S:.0f} s for the rollout thread to end: an engine step hangs"
                )

    def close(self) -> None:
        """Ends all tasks, then what `on_close` has, then the loop; the caller closes the engine."""
        if self._loop.is_running() or self._loop.is_closed():  # a hanging thread still runs the loop
            return
        self._is_closing = True
        try:
            self._end(lambda: asyncio.all_tasks(self._loop))
            self._loop.run_until_complete(self.on_close.aclose())
        finally:
            self._loop.close()

    def _end(self, tasks: Callable[[], Collection[asyncio.Task[Any]]]) -> None:
        """Cancels tasks until none is left, since callbacks that were due may start new tasks.

        Tasks of a user's code that refuse to end are left behind after a deadline.
        """
        while running := tuple(tasks()):
            for task in running:
                task.cancel()
            ended, left = self._loop.run_until_complete(asyncio.wait(running, timeout=_STOP_TIMEOUT_S))
            _ = [task.cancelled() or task.exception() for task in ended]  # else asyncio logs exceptions
            self._tasks.difference_update(running)  # also tasks that had not started
            if left:
                log.warning("%d tasks do not end %.0f s after their cancellation", len(left), _STOP_TIMEOUT_S)
                return


def _first_failure(error: BaseException) -> BaseException:
    """Returns the first failure inside nested task groups, or the failure itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
