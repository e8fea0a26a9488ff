"""How much of the time something stood idle, asked by another thread than the one that knows."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class IdleClock:
    """Spans of idleness; each part counts between the two questions around it. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked = clock()
        self._since: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """A span begins, or goes on."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    def end(self) -> None:
        """The span ends, if there is one."""
        if self._since is None:  # asked a step; only the thread that begins spans ends them
            return
        with self._lock:
            self._count(self._clock())
            self._since = None

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Something is done in an idle span, if this is one: the span goes on afterwards."""
        with self._lock:
            was_idle = self._since is not None
            self._count(self._clock())
            self._since = None
        try:
            yield
        finally:
            with self._lock:
                self._since = self._clock() if was_idle else None

    def share(self) -> float:
        """Share of the time since the last question, or since the start, that was idle; from 0 to 1."""
        with self._lock:
            now = self._clock()
            self._count(now)
            share = self._seconds / (now - self._asked) if now > self._asked else 0.0
            self._seconds, self._asked = 0.0, now
            return min(share, 1.0)  # a sum of parts may round to more than their whole

    def _count(self, now: float) -> None:
        if self._since is not None:
            self._seconds += now - self._since
            self._since = now
