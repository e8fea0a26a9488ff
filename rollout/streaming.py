"""Generation beside optimisation: one thread that keeps the engines busy and the buffer filled.

    rollout thread                                        learner's thread
    ──────────────                                        ────────────────
    while not told to end:                                batch = take()       waits for ready groups
      commands (a push, a snapshot)      ◀── call ───     push weights         waits until the thread ran it
      admit groups while the buffer lets it
      engine.step, finished groups scored ── put ──▶      train on the batch
      nothing in flight: wait ◀───── a take, a push, a command wakes it

consumes: prompts, commands.  waits for: the engine (one step), or a wake-up.  unblocked by: any response, `call`,
a take or a push.  An exception in this thread is raised in the learner by `take` or `call`, with its traceback.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tensordict import TensorDictBase

from envs.task import Example
from rollout.collector import Rollouts
from rollout.group_buffer import GroupBuffer

Result = TypeVar("Result")
_STEP_S = 0.05
_IDLE_S = 0.02


class PromptQueue:
    """A prompt source with a way back: examples that were drawn and not trained on are drawn again first."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.returned: deque[Example] = deque()

    def draw(self, count: int) -> list[Example]:
        again = [self.returned.popleft() for _ in range(min(count, len(self.returned)))]
        return again + self.source.draw(count - len(again))

    def state_dict(self, outstanding: list[Example] | None = None) -> dict[str, Any]:
        """`outstanding`: examples in flight or buffered, to be drawn first after a resume."""
        waiting = [*(outstanding or []), *self.returned]
        return {
            "source": self.source.state_dict(),
            "returned": [[list(example.messages), example.answer, example.row] for example in waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.returned = deque(
            Example(tuple(messages), answer, row) for messages, answer, row in state["returned"]
        )


class Stream:
    """Runs `rollouts` in a thread of its own and feeds `buffer`.

    Args:
        in_flight: groups that all engines together hold at a time.
        timeout: seconds that a call may wait for the thread.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        prompts: PromptQueue,
        buffer: GroupBuffer[tuple[Example, TensorDictBase]],
        in_flight: int,
        timeout: float,
    ) -> None:
        self.rollouts = rollouts
        self.prompts = prompts
        self.buffer = buffer
        self.in_flight = in_flight
        self.timeout = timeout
        self.idle_seconds = 0.0
        self._waiting: dict[int, tuple[int, TensorDictBase, Example]] = {}
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the thread after its current step; groups in flight are abandoned."""
        self._ending.set()
        self._thread.join(self.timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the rollout thread did not end within {self.timeout:.0f} s: an engine step hangs"
            )

    @property
    def groups_in_flight(self) -> int:
        return len(self._waiting)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` in the rollout thread, between two engine steps, and return what it returns.

        Raises:
            TimeoutError: the thread did not come to it in time.
        """
        if not self._thread.is_alive():
            if self._thread.ident is not None:
                self.buffer.check()
            return function()
        future: Future[Result] = Future()
        self._commands.put((function, future))
        deadline = time.monotonic() + self.timeout
        while not future.done():
            self.buffer.check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the learner waited {self.timeout:.0f} s (train.wait_timeout_s) for the rollout thread, which "
                    f"is in an engine step or a reward with {len(self._waiting)} groups in flight"
                )
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                continue
        return future.result()

    def take(self) -> list[TensorDictBase]:
        """The next batch of groups; see `GroupBuffer.take`."""
        taken = self.buffer.take(self.timeout, lambda group: self.prompts.returned.append(group[0]))
        return [group for _, group in taken]

    def outstanding(self) -> list[Example]:
        """Examples in flight, then those of groups that no batch has taken; call it in the thread."""
        flying = [example for _, _, example in sorted(self._waiting.values(), key=lambda entry: entry[0])]
        return [example for example, _ in self.buffer.contents()] + flying

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._obey()
                self._admit()
                if self._waiting:
                    self._advance()
                else:
                    began = time.perf_counter()
                    self._ending.wait(_IDLE_S)
                    self.idle_seconds += time.perf_counter() - began
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

    def _admit(self) -> None:
        policy, env = self.rollouts.policy, self.rollouts.env
        while len(self._waiting) < self.in_flight and self.buffer.may_admit():
            group = env.groups(1)
            (request,) = policy.requests(group)
            example = env.in_flight[request.request_id]
            self._waiting[request.request_id] = (self.buffer.admit(), group, example)
            policy.engine.submit(request)

    def _advance(self) -> None:
        for response in self.rollouts.policy.engine.step(timeout=_STEP_S):
            sequence, group, example = self._waiting.pop(response.request_id)
            scored = self.rollouts.env.step(self.rollouts.policy.fill(group, [response]))
            began = min(version for c in response.completions for version in c.policy_versions)
            self.buffer.put(sequence, began, (example, scored))
