"""Clock of the engines' idle share, over spans that its callers begin and end.

One thread begins and ends idle spans; another thread may read the share.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class EngineIdleClock:
    """Idle share of the engines between two calls of `share`.

    A span that covers several calls counts in each window by its seconds there.
    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._window_start = clock()
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    def begin(self) -> None:
        """Begins an idle span, unless one is open."""
        with self._lock:
            if self._idle_since is None:
                self._idle_since = self._clock()

    def end(self) -> None:
        """Ends the open idle span, if any."""
        # Read without the lock, since this runs at every step; only the thread that begins spans ends them.
        if self._idle_since is None:
            return
        with self._lock:
            self._add_idle_seconds(self._clock())
            self._idle_since = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pauses the open idle span, if any, for the duration of the block."""
        with self._lock:
            was_idle = self._idle_since is not None
            self._add_idle_seconds(self._clock())
            self._idle_since = None
        try:
            yield
        finally:
            with self._lock:
                self._idle_since = self._clock() if was_idle else None

    def share(self) -> float:
        """Returns the idle share of the time since the last call, in [0, 1]."""
        with self._lock:
            timestamp = self._clock()
            self._add_idle_seconds(timestamp)
            share = self._idle_seconds / (timestamp - self._window_start) if timestamp > self._window_start else 0.0
            self._idle_seconds, self._window_start = 0.0, timestamp
            return min(share, 1.0)  # rounding may push the sum of spans above the window

    def _add_idle_seconds(self, timestamp: float) -> None:
        if self._idle_since is not None:
            self._idle_seconds += timestamp - self._idle_since
            self._idle_since = timestamp
