"""Ray actor of one engine, whose calls and engine steps run in one thread.

    pool ── submit, cancel, load, score ──▶ commands ─┐
                                                      ├─▶ the engine's own thread: a command, else one engine step
    pool ◀── poll ── finished responses ◀─────────────┘

The engine is built and used in that one thread. The thread consumes commands, waits for one only while no request is in
flight, and is unblocked by any command. `poll` consumes finished responses and waits for one at most `timeout`
seconds. `stacks` runs in a thread of its own, so it answers while the engine hangs.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torchgrpo.cluster.actor_calls import dump_own_stacks
from torchgrpo.rollout.engines.interface import Engine, Request, Response, SequenceScores
from torchgrpo.rollout.weights.weight_update import WeightUpdate

CONCURRENCY_GROUPS = {"poll": 1, "watch": 1}


class WeightHandle(Protocol):
    """Handle of published weights that any process can open."""

    def open(self) -> WeightUpdate: ...


@dataclass(frozen=True)
class PollReport:
    """Result of `poll`: finished responses, and the number of engine steps since the start."""

    responses: list[Response]
    steps: int


class EngineActor:
    """Actor class of one engine; a call waits for one engine step at most.

    environment: variables that are set before the engine is built (device selection).
    """

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._responses: list[Response] = []
        self._failure: BaseException | None = None
        self._steps = 0
        self._engine: Engine
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_commands, name="engine", daemon=True)
        self._thread.start()

    def start(self, factory: Callable[[], Engine]) -> int:
        """Builds the engine and returns the id of this process.

        Raises the exception of the factory.
        """

        def build() -> None:
            self._engine = factory()

        self._run_in_engine_thread(build)
        return os.getpid()

    def submit(self, requests: Sequence[Request]) -> None:
        def submit_all() -> None:
            for request in requests:
                self._engine.submit(request)

        self._run_in_engine_thread(submit_all)

    def cancel(self, request_id: int) -> None:
        self._run_in_engine_thread(lambda: self._engine.cancel(request_id))

    def poll(self, timeout: float) -> PollReport:
        """Returns the responses finished since the last call; waits at most `timeout` seconds for one.

        Raises the exception of an engine step.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._responses or self._failure is not None, timeout)
            if self._failure is not None:
                raise self._failure
            responses, self._responses = self._responses, []
            return PollReport(responses, self._steps)

    def load(self, handle: WeightHandle, version: int) -> None:
        """Loads published weights between two steps."""
        self._run_in_engine_thread(lambda: self._engine.load(handle.open(), version))

    def score(self, sequences: Sequence[Sequence[int]]) -> SequenceScores:
        scores: dict[str, SequenceScores] = self._run_in_engine_thread(lambda: self._engine.score(sequences))
        return next(iter(scores.values()))

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Calls any other method of the engine, such as `VLLMEngine.transfer`."""
        return self._run_in_engine_thread(lambda: getattr(self._engine, method)(**arguments))

    def stacks(self) -> str:
        """Returns the stack traces of all threads of this process."""
        return dump_own_stacks()

    def close(self) -> None:
        """Ends the engine and its thread."""

        def end() -> None:
            self._is_closed = True
            self._engine.close()

        self._run_in_engine_thread(end)

    def _run_in_engine_thread(self, action: Callable[[], Any]) -> Any:
        """Runs `action` in the engine's thread and returns its result, or raises its exception."""
        future: Future[Any] = Future()
        self._commands.put((action, future))
        return future.result()

    def _run_commands(self) -> None:
        busy = False
        while not self._is_closed:
            try:
                action, future = self._commands.get(block=not busy)
            except queue.Empty:
                busy = self._step()
                continue
            try:
                future.set_result(action())
                busy = not self._is_closed and self._engine.in_flight > 0
            except BaseException as error:
                future.set_exception(error)

    def _step(self) -> bool:
        """Runs one engine step; returns whether another step is due."""
        try:
            responses = self._engine.step(0.0)
        except BaseException as error:
            with self._condition:
                self._failure = error
                self._condition.notify()
            return False
        self._steps += 1
        if responses:
            with self._condition:
                self._responses += responses
                self._condition.notify()
        return self._engine.in_flight > 0
