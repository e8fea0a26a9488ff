"""What runs in an engine's actor: the engine, and the thread that drives it.

    pool ── submit, load, score ──▶ commands ─┐
                                              ├─▶ the engine's own thread: a command, else one engine step
    pool ◀── poll ── finished responses ◀─────┘

The engine is built and used in that one thread. It consumes commands, waits for one only while nothing is
in flight, and is unblocked by any command. `poll` consumes finished responses and waits for one at most
`timeout` seconds. `stacks` runs in a thread of its own, so it answers while the engine hangs.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torchgrpo.cluster.calls import own_stacks
from torchgrpo.rollout.engines.interface import Engine, Request, Response, SequenceScores
from torchgrpo.rollout.weights.outgoing import Outgoing

CONCURRENCY_GROUPS = {"poll": 1, "watch": 1}


class WeightHandle(Protocol):
    """Published weights that any process can open."""

    def open(self) -> Outgoing: ...


@dataclass(frozen=True)
class Report:
    """What `poll` brings: finished responses, and how many steps the engine has made since its start."""

    responses: list[Response]
    steps: int


class EngineActor:
    """One engine behind calls that never block one another longer than a step.

    environment: set before the engine is built (device selection).
    """

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._responses: list[Response] = []
        self._failure: BaseException | None = None
        self._steps = 0
        self._engine: Engine
        self._ended = False
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def start(self, factory: Callable[[], Engine]) -> int:
        """Build the engine; returns this process's id. Raises whatever the factory raises."""

        def build() -> None:
            self._engine = factory()

        self._do(build)
        return os.getpid()

    def submit(self, requests: Sequence[Request]) -> None:
        def submit_all() -> None:
            for request in requests:
                self._engine.submit(request)

        self._do(submit_all)

    def poll(self, timeout: float) -> Report:
        """Responses that finished since the last call; waits for one at most `timeout` seconds.

        Raises whatever the engine raised in a step.
        """
        with self._news:
            self._news.wait_for(lambda: self._responses or self._failure is not None, timeout)
            if self._failure is not None:
                raise self._failure
            responses, self._responses = self._responses, []
            return Report(responses, self._steps)

    def load(self, handle: WeightHandle, version: int) -> None:
        """Load published weights between two steps."""
        self._do(lambda: self._engine.load(handle.open(), version))

    def score(self, sequences: Sequence[Sequence[int]]) -> SequenceScores:
        scores: dict[str, SequenceScores] = self._do(lambda: self._engine.score(sequences))
        return next(iter(scores.values()))

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Any other method of the engine, such as vLLM's `transfer`."""
        return self._do(lambda: getattr(self._engine, method)(**arguments))

    def stacks(self) -> str:
        """Stack traces of every thread of this process."""
        return own_stacks()

    def close(self) -> None:
        """End the engine and its thread."""

        def end() -> None:
            self._ended = True
            self._engine.close()

        self._do(end)

    def _do(self, action: Callable[[], Any]) -> Any:
        """Run `action` in the engine's thread; its result, or its exception."""
        future: Future[Any] = Future()
        self._commands.put((action, future))
        return future.result()

    def _drive(self) -> None:
        busy = False
        while not self._ended:
            try:
                action, future = self._commands.get(block=not busy)
            except queue.Empty:
                busy = self._step()
                continue
            try:
                future.set_result(action())
                busy = not self._ended and self._engine.in_flight > 0
            except BaseException as error:
                future.set_exception(error)

    def _step(self) -> bool:
        """One engine step; whether another one is due."""
        try:
            responses = self._engine.step(0.0)
        except BaseException as error:
            with self._news:
                self._failure = error
                self._news.notify()
            return False
        self._steps += 1
        if responses:
            with self._news:
                self._responses += responses
                self._news.notify()
        return self._engine.in_flight > 0
