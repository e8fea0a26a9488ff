"""Generation beside optimisation: one thread that keeps the engines busy and the buffer filled.

    rollout thread                                        learner's thread
    ──────────────                                        ────────────────
    while not told to end:                                batch = take()       waits for ready groups
      commands (a push, a snapshot)      ◀── call ───     push weights         waits until the thread ran it
      admit groups while the buffer lets it
      engine.step, finished groups judged ── put ─▶       train on the batch
      nothing in flight: wait ◀───── a take, a push, a command wakes it

consumes: prompts, commands.  waits for: the engine (one step), a verdict, or a wake-up.  unblocked by: any
response or verdict, `call`, a take or a push.  An exception in this thread is raised in the learner by `take`
or `call`, with its traceback.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, TypeVar

from tensordict import TensorDictBase

from config.errors import DeadlineError
from envs.task import Example
from rollout.collector import Keep, Rollouts, StreamedGroup
from rollout.controller import Controller
from rollout.engines.sampler import Request, Response
from rollout.group_buffer import GroupBuffer
from rollout.idle import IdleClock
from rollout.selection import in_place_of

Result = TypeVar("Result")
_STEP_S = 0.05
_IDLE_S = 0.02
_END_S = 30.0


def _row_data(
    examples: Sequence[Example], wanted: Sequence[Example]
) -> dict[tuple[str, int], Mapping[str, Any]]:
    """The `row_data` of those among the examples that are wanted."""
    places = {(example.source, example.row) for example in wanted}
    return {
        (example.source, example.row): example.row_data
        for example in examples
        if (example.source, example.row) in places
    }


class PromptQueue:
    """A prompt source with a way back: examples that were drawn and not trained on are drawn again first."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.returned: deque[Example] = deque()

    def draw(self, count: int) -> list[Example]:
        again = [self.returned.popleft() for _ in range(min(count, len(self.returned)))]
        return again + self.source.draw(count - len(again))

    def observe(self, example: Example, success: float) -> None:
        self.source.observe(example, success)

    def state_dict(self, outstanding: list[Example] | None = None) -> dict[str, Any]:
        """`outstanding`: examples in flight or buffered, to be drawn first after a resume."""
        waiting = [*(outstanding or []), *self.returned]
        return {
            "source": self.source.state_dict(),
            # Without the row, which may hold what a checkpoint cannot; the data still has it.
            "returned": [
                asdict(replace(example, row_data={})) | {"messages": list(example.messages)}
                for example in waiting
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        returned = [
            Example(**(fields | {"messages": tuple(fields["messages"])})) for fields in state["returned"]
        ]
        rows = _row_data(self.source.examples, returned) if returned else {}
        self.returned = deque(
            replace(example, row_data=rows.get((example.source, example.row), {})) for example in returned
        )


class Stream:
    """Runs `rollouts` in a thread of its own and feeds `buffer`.

    Args:
        in_flight: groups that all engines together hold at a time.
        timeout: seconds that a call may wait for the thread.
        keep: dynamic sampling, as in `Rollouts.collect`.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        prompts: PromptQueue,
        buffer: GroupBuffer[StreamedGroup],
        in_flight: int,
        timeout: float,
        keep: Keep | None = None,
    ) -> None:
        self.rollouts = rollouts
        self.buffer = buffer
        self.timeout = timeout
        self._source = _Source(rollouts, prompts, keep)
        self.controller = Controller(rollouts.policy.engine, self._source, buffer, in_flight)
        self._idle = IdleClock()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the thread after its current step; groups that no batch has taken are abandoned.

        Raises:
            DeadlineError: the thread goes on, and no other exception is on its way.
        """
        self._ending.set()
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            for group in self.controller.outstanding():
                self._source.abandon(group)
        elif exception[0] is None:
            raise DeadlineError(
                f"the run waited {_END_S:.0f} s for the rollout thread to end: an engine step hangs"
            )

    @property
    def groups_in_flight(self) -> int:
        return self.controller.groups_in_flight

    def idle_share(self) -> float:
        """Share of the time since the last call in which no engine had anything to do."""
        return self._idle.share()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` in the rollout thread, between two engine steps, and return what it returns.

        Raises:
            DeadlineError: the thread did not come to it in time.
        """
        future: Future[Result] = Future()
        self._commands.put((function, future))
        deadline = time.monotonic() + self.timeout
        while not future.done():
            self.buffer.check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the learner waited {self.timeout:.0f} s (train.wait_timeout_s) for the rollout thread, which "
                    f"is in an engine step or a reward with {self.groups_in_flight} groups in flight"
                )
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                continue
        return future.result()

    def take(self, meanwhile: Callable[[], None]) -> TensorDictBase:
        """The next batch of groups; see `GroupBuffer.take`. Its tensors are made here, in the learner's thread."""
        return self.rollouts.assemble(self.buffer.take(self.timeout, self._source.abandon, meanwhile))

    def outstanding(self) -> list[Example]:
        """Examples that no batch has taken; to be asked in the thread."""
        return [group.prompted.example for group in self.controller.outstanding()]

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._obey()
                self.controller.admit()
                with nullcontext() if self.controller.generating else self._idle.idle():
                    if self.controller.groups_in_flight:
                        self.controller.advance(_STEP_S)
                    else:
                        self._ending.wait(_IDLE_S)
        except BaseException as error:
            self.buffer.fail(error)

    def _obey(self) -> None:
        while True:
            try:
                function, future = self._commands.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class _Source:
    """Groups for the controller; each keeps its example, so that it can be put back."""

    def __init__(self, rollouts: Rollouts, prompts: PromptQueue, keep: Keep | None) -> None:
        self.rollouts = rollouts
        self.prompts = prompts
        self.keep = keep
        self._refused: dict[int, TensorDictBase] = {}

    def begin(self, count: int) -> list[tuple[Request, StreamedGroup]]:
        return [(group.request, group) for group in self.rollouts.begin(count)]

    def judge(self, answered: list[tuple[StreamedGroup, Response]]) -> None:
        for group, response in answered:
            group.response = response
        self.rollouts.env.submit([(group.prompted, response.completions) for group, response in answered])

    def judged(self, timeout: float) -> list[int]:
        return self.rollouts.env.judged(timeout)

    def replacement(self, group: StreamedGroup) -> tuple[Request, StreamedGroup] | None:
        if self.keep is None:
            return None
        scored = self.rollouts.assemble([group])
        refused = self._refused.pop(group.request.request_id, None)
        if refused is not None:
            self.rollouts.records.replace(refused, scored)
            scored = in_place_of(refused, scored)
        replaced = int(scored["generated", "groups"][0, 0]) - 1
        if replaced >= self.rollouts.attempts or bool(self.keep(scored)):
            group.scored = scored
            return None
        ((request, another),) = self.begin(1)
        self._refused[request.request_id] = scored
        return request, another

    def abandon(self, group: StreamedGroup) -> None:
        self.rollouts.env.forget(group.prompted.group_id)
        self.prompts.returned.append(group.prompted.example)
