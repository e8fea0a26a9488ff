"""Kills ranks in chosen calls, while the others work on them. Not a test file."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from torchgrpo.cluster.calls import Reference
from torchgrpo.training.ranks import Ranks


class Killer:
    """Kills one rank in chosen calls, each once.

    It is stopped before the call, so that it cannot answer. victim: the beginning of its name. calls: (method, how many
    of it came since the last kill).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, victim: str, *calls: tuple[str, int]) -> None:
        self.left = list(calls)
        self.seen: dict[str, int] = {}
        self._lock = threading.Lock()
        begin = Ranks.begin

        def killing(ranks: Ranks, method: str, arguments: Sequence[Sequence[Any]]) -> list[Reference]:
            numbers = [number for number, place in enumerate(ranks.places) if place.name.startswith(victim)]
            if not numbers or not self._chosen(method):
                return begin(ranks, method, arguments)
            pid = ranks.process_ids[numbers[0]]
            os.kill(pid, signal.SIGSTOP)
            calls = begin(ranks, method, arguments)
            os.kill(pid, signal.SIGKILL)
            return calls

        monkeypatch.setattr(Ranks, "begin", killing)

    def _chosen(self, method: str) -> bool:
        """Count a call; the threads of several copies come here."""
        with self._lock:
            self.seen[method] = self.seen.get(method, 0) + 1
            if not self.left or self.left[0] != (method, self.seen[method]):
                return False
            self.left.pop(0)
            self.seen = {}
            return True
