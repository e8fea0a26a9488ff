"""The asyncio loop that engines, graders and groups share. One thread drives it: the caller's, or one of its own.

    groups (tasks)                          pump (a task), turn by turn while anything is pending
    ──────────────                          ─────────────────────────────────────────────────────
    begin, go on ◀──────────────────────    before_step, then the groups that it began
    await generate(request) ── submit ──▶   engine.step          waits 0.05 s at most for a response
                            ◀─ tokens ───   the group goes on before the next step
    await judge(completions) ─ submit ──▶   graders polled       waits as long, where no engine has anything to do
                            ◀─ verdicts ─   the group goes on before the next step
    await anything else (a tool, HTTP) ◀─   has its turn between two steps;
                                            with nothing pending there is no pump before a submit or a wake-up

    in lockstep                             in overlap
    ───────────                             ──────────
    run(coroutine) drives the loop          `with loop.thread():` a thread drives it for as long as the block lasts
    call(function) calls it                 run, call: from another thread, which waits; a call comes between two steps

The thread of overlap.  consumes: calls, coroutines.  waits for: the engine (one step), a verdict, a tool, or a wake-up.
unblocked by: any response or verdict, `run`, `call`, `wake`.  What fails in it is raised in `run` and `call`, with its
traceback, and told to `on_failure`. Of a task group that fails, it is the first failure.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import torch

from config.schema.errors import DeadlineError
from envs.group import SampledCompletion, Verdict
from envs.judging.blame import Ticket
from envs.judging.service import RewardService
from envs.task import Completion, Example
from torchgrpo.rollout.engines.interface import Request, SteppedEngine
from torchgrpo.rollout.generate import Judge
from torchgrpo.rollout.idle import IdleClock

Result = TypeVar("Result")
_STEP_S = 0.05
_LOOK_S = 0.5
_END_S = 30.0


class EngineLoop:
    """Makes a sampler of an engine that is stepped, and judges of graders that are polled.

    Args:
        timeout: seconds in which the engine must finish something, while it has anything to do.
        wait_timeout: seconds that a call may wait for the thread.
    """

    def __init__(self, engine: SteppedEngine, timeout: float, wait_timeout: float) -> None:
        self.engine = engine
        self.timeout = timeout
        self.wait_timeout = wait_timeout
        self.idle = IdleClock()
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.before_step: Callable[[], None] = lambda: None
        self._ids = count()
        self._generating: dict[int, asyncio.Future[list[SampledCompletion]]] = {}
        self._judging: dict[asyncio.Future[list[Verdict]], tuple[RewardService, Ticket]] = {}
        self._progressed = 0.0
        self._loop = asyncio.new_event_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._woken = False
        self._loop.call_soon(self._resume)

    # -- for groups, in the loop

    async def generate(self, request: Request) -> list[SampledCompletion]:
        """See `Sampler`. The engine is given an id of the loop's own."""
        own = next(self._ids)
        self.engine.submit(Request(own, request.prompt, request.n, request.sampling, request.seed))
        if not self._generating:
            self._progressed = time.monotonic()
            self.idle.end()
        answer: asyncio.Future[list[SampledCompletion]] = self._loop.create_future()
        self._generating[own] = answer
        self._resume()
        try:
            return await answer
        finally:
            del self._generating[own]  # what the engine finishes of a request that was given up is dropped

    def judge(self, grader: RewardService) -> Judge:
        """What awaits the verdicts of this grader."""

        async def judge(completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
            ticket = grader.submit(completions, examples)
            if not ticket.missing:
                verdicts = grader.poll(ticket)
                assert verdicts is not None
                return list(verdicts)
            answer: asyncio.Future[list[Verdict]] = self._loop.create_future()
            self._judging[answer] = grader, ticket
            self._resume()
            try:
                return await answer
            finally:
                del self._judging[answer]

        return judge

    def spawn(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A task that nobody awaits; if it fails, so does everything that the loop runs."""
        task = self._loop.create_task(begin())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            error = _first(error)
            self._failure.set_exception(error)
            self._failure.exception()  # else asyncio complains of one that nobody asked for
            self.on_failure(error)

    def _resume(self) -> None:
        """The pump takes at least one more turn."""
        self._woken = True
        if self._pumping is None:
            self._pumping = self._loop.create_task(self._pump())

    async def _pump(self) -> None:
        """Steps the engine and polls the graders, turn by turn, while anything is pending."""
        try:
            while self._woken or self._generating or self._judging:
                self._woken = False
                self.before_step()
                # Tasks that can go on come before the pump in asyncio's queue: what was begun is submitted now.
                await asyncio.sleep(0)
                if self._generating:
                    answered = self._step() | self._poll(0.0)
                else:
                    self.idle.begin()
                    answered = self._poll(_STEP_S)
                if answered:
                    await asyncio.sleep(0)  # the room that they leave is there for `before_step`
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._fail(error)  # there is no other pump
        else:
            self.idle.begin()
            self._pumping = None

    def _step(self) -> bool:
        """Whether the engine finished anything."""
        responses = self.engine.step(_STEP_S)
        now = time.monotonic()
        if responses:
            self._progressed = now
        elif now - self._progressed > self.timeout:
            raise DeadlineError(
                f"the rollout waited {self.timeout:.0f} s (inference_model.request_timeout_s) for the engine to "
                f"finish any of {len(self._generating)} requests"
            )
        for response in responses:
            answer = self._generating.get(response.request_id)
            if answer is not None and not answer.done():
                answer.set_result(response.completions)
        return bool(responses)

    def _poll(self, timeout: float) -> bool:
        """Whether any verdicts came, in `timeout` seconds at most."""
        one_of_each = {id(grader): (grader, ticket) for grader, ticket in self._judging.values()}
        for grader, ticket in one_of_each.values():
            grader.poll(ticket, timeout)
            timeout = 0.0
        came = False
        for answer, (grader, ticket) in self._judging.items():
            verdicts = None if ticket.missing else grader.poll(ticket)
            if verdicts is not None and not answer.done():
                answer.set_result(list(verdicts))
                came = True
        return came

    # -- for whoever drives it, or another thread while its own does

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What the coroutine returns, or raises.

        Raises:
            DeadlineError: the thread did nothing for `wait_timeout` seconds.
            BaseException: what an engine, a grader or a spawned task failed with.
        """
        if self._thread is None:
            return self._loop.run_until_complete(self._guarded(coroutine))
        future = asyncio.run_coroutine_threadsafe(self._guarded(coroutine), self._loop)
        try:
            while True:
                try:
                    return future.result(_LOOK_S)
                except TimeoutError:  # of the wait, or the coroutine's own
                    if future.done():
                        return future.result()
                    self.call(lambda: None)
        finally:
            future.cancel()

    def run_all(self, coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """The results of coroutines that run side by side, in their order; raises as `run`."""

        async def run_together() -> list[Result]:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(coroutine) for coroutine in coroutines]
            return [task.result() for task in tasks]

        return self.run(run_together())

    async def _guarded(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        task = self._loop.create_task(coroutine)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        self._check()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise _first(error)
        return task.result()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` where the engines may be used, between two of their steps; what it returns, or raises.

        Raises:
            DeadlineError: the thread did not come to it in time.
        """
        if self._thread is None:
            return self._obey(function)
        future: Future[Result] = Future()

        def obey() -> None:
            try:
                future.set_result(self._obey(function))
            except BaseException as error:
                future.set_exception(error)

        self._check()
        self._loop.call_soon_threadsafe(obey)
        deadline = time.monotonic() + self.wait_timeout
        while not future.done():
            self._check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the learner waited {self.wait_timeout:.0f} s (train.wait_timeout_s) for the rollout thread, "
                    f"which is in an engine step or a reward with {len(self._generating)} requests in flight"
                )
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                continue
        return future.result()

    def _check(self) -> None:
        """Raises what the thread failed with, if it did."""
        if self._failure.done():
            self._failure.result()

    def _obey(self, function: Callable[[], Result]) -> Result:
        """Its seconds are neither the engine's nor idle."""
        began = time.monotonic()
        with self.idle.interrupted():
            try:
                return function()
            finally:
                self._progressed += time.monotonic() - began

    def wake(self) -> None:
        """Have `before_step` called soon; from any thread."""
        self._loop.call_soon_threadsafe(self._resume)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """A thread drives the loop as long as the block lasts. Spawned tasks end with it.

        Raises:
            DeadlineError: the thread does not end, and no other exception is on its way.
        """
        self._thread = threading.Thread(target=self._drive, name="rollouts", daemon=True)
        self._thread.start()
        raised = True
        try:
            yield
            raised = False
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
            hangs, self._thread = self._thread.is_alive(), None
            if not hangs:
                self._end(lambda: self._tasks)
            elif not raised:
                raise DeadlineError(
                    f"the run waited {_END_S:.0f} s for the rollout thread to end: an engine step hangs"
                )

    def _drive(self) -> None:
        # A thread takes up torch's number of threads when torch first asks there for it; until then OpenMP has its own,
        # by which a vLLM engine would plan an attention that it then computes with another.
        torch.get_num_threads()
        self._loop.run_forever()

    def close(self) -> None:
        """Ends all tasks; the engine is the caller's."""
        if not self._loop.is_running():  # its thread may hang
            self._end(lambda: asyncio.all_tasks(self._loop))
            self._loop.close()

    def _end(self, tasks: Callable[[], Collection[asyncio.Task[Any]]]) -> None:
        """Until there are none: what was due in the loop may begin others."""
        while running := tuple(tasks()):
            for task in running:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
            self._tasks.difference_update(running)  # those that had not begun, too


def _first(error: BaseException) -> BaseException:
    """The failure itself, or the first one of a task group and of those inside it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
