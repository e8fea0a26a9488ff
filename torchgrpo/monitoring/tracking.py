"""Where metrics go: always `metrics.jsonl` in the run folder, and the trackers that `logging.backend` names.

    a run's loop                             one thread for each tracker
    ────────────                             ───────────────────────────
    Trackers.metrics ─┬─▶ queue, bounded ─▶ W&B     log, log, log ... close
                      └─▶ queue, bounded ─▶ MLflow  log, log, log ... close
    Trackers.told ◀──────── warnings ◀─────────────────┘

The loop puts a row into the queues and goes on: a tracker that raises, hangs or cannot be reached costs it nothing.
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
from torchgrpo.monitoring.tracker_interface import CLOSE_S, OpenTracker, ShownCompletion, Tell, Tracker

log = python_logging.getLogger("grpo")
QUEUED = 256
"""Calls that wait for a tracker before further ones are dropped."""
OPEN_S = 20.0
"""How long a run waits for its trackers to be open before it begins without them."""
FAILURES = 3
"""After so many in a row a tracker gets nothing more of the run."""
Call = Callable[[Tracker], None]


class TrackerThread:
    """One tracker, opened, called and closed in a thread of its own. tell: takes a line, from any thread."""

    def __init__(self, name: str, opens: Callable[[Tell], Tracker], tell: Tell) -> None:
        self.name = name
        self.tell = tell
        self.calls: Queue[Call | None] = Queue(QUEUED)
        self.outcome: RunOutcome = "failed"
        self.dropped = 0
        self.failures = 0
        self.warned = False
        self.opened = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(opens,), name=f"tracker {name}", daemon=True)
        self.thread.start()

    def put(self, call: Call) -> None:
        """Hand over what is to be done; drop it where the tracker takes nothing more. Never waits."""
        if not self.thread.is_alive() or self.failures >= FAILURES:
            return
        try:
            self.calls.put_nowait(call)
        except Full:
            self.dropped += 1
            if self.dropped == 1:
                self.tell(
                    f"warning: {self.name} (logging.backend) does not take what it is sent, {QUEUED} rows wait for it; "
                    "further ones are dropped until it does, metrics.jsonl goes on"
                )

    def end(self, outcome: RunOutcome) -> None:
        """Ask it to close after what still waits. Never waits: a queue that is full loses a row for it."""
        self.outcome = outcome
        while True:
            try:
                self.calls.put_nowait(None)
                return
            except Full:
                with suppress(Empty):
                    self.calls.get_nowait()
                    self.dropped += 1

    def wait(self, deadline: float) -> None:
        """Until it has closed, or until `deadline`, and say what it did not take."""
        self.thread.join(max(deadline - time.monotonic(), 0.0))
        if self.thread.is_alive():
            self.tell(
                f"warning: {self.name} (logging.backend) did not end within {CLOSE_S:.0f} s and is left behind; "
                f"{self.calls.qsize()} rows wait in it, metrics.jsonl has them all"
            )
        if self.dropped:
            self.tell(f"warning: {self.name}: {self.dropped} rows were dropped, metrics.jsonl has them all")

    def _work(self, opens: Callable[[Tell], Tracker]) -> None:
        try:
            tracker = opens(self.tell)
        except Exception as error:
            self.tell(
                f"warning: {self.name} (logging.backend) cannot be used, metrics.jsonl goes on: {_short(error)}"
            )
            return
        finally:
            self.opened.set()
        while (call := self.calls.get()) is not None:
            self._do(call, tracker)
        try:
            tracker.close(self.outcome)
        except Exception as error:
            self.tell(f"warning: {self.name} (logging.backend) could not be closed: {_short(error)}")

    def _do(self, call: Call, tracker: Tracker) -> None:
        if self.failures >= FAILURES:
            return
        try:
            call(tracker)
            self.failures = 0
        except Exception as error:
            self.failures += 1
            log.info("%s", self.name, exc_info=True)
            if not self.warned:
                self.warned = True
                self.tell(
                    f"warning: {self.name} (logging.backend) failed, metrics.jsonl goes on: {_short(error)}"
                )
            if self.failures == FAILURES:
                self.tell(
                    f"warning: {self.name} failed {FAILURES} times in a row and gets nothing more of this run"
                )


def _short(error: BaseException) -> str:
    """`OSError: no such file`, one line."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}"


class Trackers:
    """All trackers of a run. No method raises; two wait, `wait_until_open` and `close`, and both have a deadline."""

    def __init__(self, opens: Mapping[str, Callable[[Tell], Tracker]]) -> None:
        self._told: SimpleQueue[str] = SimpleQueue()
        self.threads = [TrackerThread(name, one, self._told.put) for name, one in opens.items()]

    def wait_until_open(self) -> None:
        """At most `OPEN_S` seconds for all of them. Opening one sets environment variables, which crashes a process in
        which another thread reads them meanwhile, in C, as torch's do: so nothing else begins."""
        deadline = time.monotonic() + OPEN_S
        for thread in self.threads:
            thread.opened.wait(max(0.0, deadline - time.monotonic()))

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        for thread in self.threads:
            thread.put(lambda tracker: tracker.metrics(numbers, step))

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        for thread in self.threads:
            thread.put(lambda tracker: tracker.completions(shown, step))

    def told(self) -> list[str]:
        """What the trackers have to say since the last call, each thing once."""
        return [self._told.get_nowait() for _ in range(self._told.qsize())]

    def close(self, outcome: RunOutcome) -> None:
        """End their runs, all at once; waits at most `CLOSE_S` seconds."""
        deadline = time.monotonic() + CLOSE_S
        for thread in self.threads:
            thread.end(outcome)
        for thread in self.threads:
            thread.wait(deadline)


def opener(
    name: str, logging: LoggingConfig, run_dir: Path, config: dict[str, Any]
) -> Callable[[Tell], Tracker]:
    """A function that opens the tracker `name`; it takes what tells the user a line.

    Raises:
        ConfigError: its package is not installed.
    """
    # Imports in the trackers' own threads, several at once, may meet half a module.
    importlib.import_module("torchrl.record.loggers")
    way: OpenTracker = TRACKERS.load(name)
    try:
        importlib.import_module(way.package)
    except ImportError as error:
        raise ConfigError(
            f"logging.backend={name}: {error}; install it with: pip install {way.install or way.package}, or leave "
            f"{name} out of logging.backend"
        ) from error
    return partial(way.open, logging, run_dir, logging.experiment_name or run_dir.name, config)


def make_tracker(logging: LoggingConfig, run_dir: Path, config: dict[str, Any]) -> Trackers | None:
    """What `logging.backend` names; None for `none`.

    Raises:
        ConfigError: the package of one is not installed.
    """
    names = logging.backends
    if not names:
        return None
    trackers = Trackers({name: opener(name, logging, run_dir, config) for name in names})
    trackers.wait_until_open()
    return trackers
