"""Trackers of a run: each service of `logging.backend` in a thread of its own.

    training loop                            one thread for each tracker
    ────────────                             ───────────────────────────
    Trackers.metrics ─┬─▶ queue, bounded ─▶ W&B     log, log, log ... close
                      └─▶ queue, bounded ─▶ MLflow  log, log, log ... close
    Trackers.take_messages ◀── warnings ◀──────────────┘

The loop puts a row into the queues and continues, so a tracker that raises, hangs or cannot be reached does not
delay the run. All metrics are in `metrics.jsonl` of the run folder as well.
"""

import importlib
import logging as python_logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue
from typing import Any

from config.schema.errors import ConfigError, RunOutcome
from config.schema.logging import TRACKERS, LoggingConfig
from torchgrpo.monitoring.tracker_interface import CLOSE_S, CompletionRow, OnMessage, Tracker, TrackerFactory

log = python_logging.getLogger("grpo")
QUEUE_SIZE = 256
"""Maximum number of calls that wait for a tracker; further calls are dropped."""
OPEN_S = 20.0
"""Maximum seconds that a run waits until its trackers are open."""
MAX_FAILURES = 3
"""Number of consecutive failures after which a tracker gets no further data of the run."""
TrackerCall = Callable[[Tracker], None]


class TrackerThread:
    """Opens, calls and closes one tracker in a thread of its own.

    on_message: receives warnings; called from several threads.
    """

    def __init__(self, name: str, open_tracker: Callable[[OnMessage], Tracker], on_message: OnMessage) -> None:
        self.name = name
        self.on_message = on_message
        self.calls: Queue[TrackerCall | None] = Queue(QUEUE_SIZE)
        self.outcome: RunOutcome = "failed"
        self.num_dropped = 0
        self.num_failures = 0
        self.has_warned = False
        self.open_event = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(open_tracker,), name=f"tracker {name}", daemon=True)
        self.thread.start()

    def put(self, call: TrackerCall) -> None:
        """Queues a call without waiting.

        The call is dropped if the queue is full or the tracker has failed.
        """
        if not self.thread.is_alive() or self.num_failures >= MAX_FAILURES:
            return
        try:
            self.calls.put_nowait(call)
        except Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                self.on_message(
                    f"warning: {self.name} (logging.backend) does not accept rows, {QUEUE_SIZE} rows are "
                    "queued; further rows are dropped until the backend accepts rows. metrics.jsonl keeps "
                    "all rows"
                )

    def end(self, outcome: RunOutcome) -> None:
        """Requests the close of the tracker after the queued calls.

        Never waits: a full queue drops its oldest call to make room.
        """
        self.outcome = outcome
        while True:
            try:
                self.calls.put_nowait(None)
                return
            except Full:
                with suppress(Empty):
                    self.calls.get_nowait()
                    self.num_dropped += 1

    def wait(self, deadline: float) -> None:
        """Waits until the tracker is closed or until `deadline`, and reports dropped rows."""
        self.thread.join(max(deadline - time.monotonic(), 0.0))
        if self.thread.is_alive():
            self.on_message(
                f"warning: {self.name} (logging.backend) did not close within {CLOSE_S:.0f} s and is abandoned; "
                f"{self.calls.qsize()} rows were not sent. metrics.jsonl has all rows"
            )
        if self.num_dropped:
            self.on_message(f"warning: {self.name}: {self.num_dropped} rows were dropped. metrics.jsonl has all rows")

    def _work(self, open_tracker: Callable[[OnMessage], Tracker]) -> None:
        try:
            tracker = open_tracker(self.on_message)
        except Exception as error:
            self.on_message(
                f"warning: {self.name} (logging.backend) cannot be used, only metrics.jsonl is written: {_short(error)}"
            )
            return
        finally:
            self.open_event.set()
        while (call := self.calls.get()) is not None:
            self._run_call(call, tracker)
        try:
            tracker.close(self.outcome)
        except Exception as error:
            self.on_message(f"warning: {self.name} (logging.backend) could not be closed: {_short(error)}")

    def _run_call(self, call: TrackerCall, tracker: Tracker) -> None:
        if self.num_failures >= MAX_FAILURES:
            return
        try:
            call(tracker)
            self.num_failures = 0
        except Exception as error:
            self.num_failures += 1
            log.info("%s", self.name, exc_info=True)
            if not self.has_warned:
                self.has_warned = True
                self.on_message(
                    f"warning: {self.name} (logging.backend) failed, metrics.jsonl is still written: {_short(error)}"
                )
            if self.num_failures == MAX_FAILURES:
                self.on_message(
                    f"warning: {self.name} failed {MAX_FAILURES} times in a row and gets no further data of this run"
                )


def _short(error: BaseException) -> str:
    """Returns the type and first line of an error, such as `OSError: no such file`."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}"


class Trackers:
    """Collection of all trackers of a run, each in its own thread.

    No method raises. Only `wait_until_open` and `close` wait, and both have a deadline.
    """

    def __init__(self, openers: Mapping[str, Callable[[OnMessage], Tracker]]) -> None:
        self._messages: SimpleQueue[str] = SimpleQueue()
        self.threads = [TrackerThread(name, open_tracker, self._messages.put) for name, open_tracker in openers.items()]

    def wait_until_open(self) -> None:
        """Waits at most `OPEN_S` seconds until all trackers are open.

        Opening a tracker sets environment variables. That crashes the process if another thread, such as one of
        torch, reads the environment in C at the same time. Therefore no other work starts before.
        """
        deadline = time.monotonic() + OPEN_S
        for thread in self.threads:
            thread.open_event.wait(max(0.0, deadline - time.monotonic()))

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        for thread in self.threads:
            thread.put(lambda tracker: tracker.metrics(numbers, step))

    def completions(self, rows: Sequence[CompletionRow], step: int) -> None:
        for thread in self.threads:
            thread.put(lambda tracker: tracker.completions(rows, step))

    def take_messages(self) -> list[str]:
        """Returns the messages since the last call and removes them."""
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def close(self, outcome: RunOutcome) -> None:
        """Closes all trackers in parallel; waits at most `CLOSE_S` seconds."""
        deadline = time.monotonic() + CLOSE_S
        for thread in self.threads:
            thread.end(outcome)
        for thread in self.threads:
            thread.wait(deadline)


def tracker_opener(
    name: str, logging: LoggingConfig, run_dir: Path, config: dict[str, Any]
) -> Callable[[OnMessage], Tracker]:
    """Returns a function that opens the tracker `name`; its argument receives messages.

    Raises:
        ConfigError: the tracker's package is not installed.
    """
    # Concurrent imports in the threads of several trackers may see a partly initialized module.
    importlib.import_module("torchrl.record.loggers")
    factory: TrackerFactory = TRACKERS.load(name)
    try:
        importlib.import_module(factory.package)
    except ImportError as error:
        raise ConfigError(
            f"logging.backend={name}: {error}; install it with: pip install {factory.install or factory.package}, or "
            f"remove {name} from logging.backend"
        ) from error
    return partial(factory.open, logging, run_dir, logging.experiment_name or run_dir.name, config)


def make_tracker(logging: LoggingConfig, run_dir: Path, config: dict[str, Any]) -> Trackers | None:
    """Opens the trackers that `logging.backend` names; returns None for `none`.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    names = logging.backends
    if not names:
        return None
    trackers = Trackers({name: tracker_opener(name, logging, run_dir, config) for name in names})
    trackers.wait_until_open()
    return trackers
