"""Kills learner ranks during chosen calls, for tests."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from torchgrpo.cluster.actor_calls import CallReference
from torchgrpo.training.ranks import Ranks


class RankKiller:
    """Kills one rank during chosen calls, once for each.

    It is stopped before the call, so that it cannot answer. victim: the beginning of its name. calls: (method, how many
    of it came since the last kill).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, victim: str, *calls: tuple[str, int]) -> None:
        self.remaining = list(calls)
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()
        begin = Ranks.begin_call

        def call_and_kill(ranks: Ranks, method: str, arguments: Sequence[Sequence[Any]]) -> list[CallReference]:
            numbers = [number for number, slot in enumerate(ranks.slots) if slot.name.startswith(victim)]
            if not numbers or not self._count_call(method):
                return begin(ranks, method, arguments)
            pid = ranks.process_ids[numbers[0]]
            os.kill(pid, signal.SIGSTOP)
            calls = begin(ranks, method, arguments)
            os.kill(pid, signal.SIGKILL)
            return calls

        monkeypatch.setattr(Ranks, "begin_call", call_and_kill)

    def _count_call(self, method: str) -> bool:
        """Counts a call, and returns whether the rank must be killed in this call.

        Threads of several copies call this method.
        """
        with self._lock:
            self.counts[method] = self.counts.get(method, 0) + 1
            if not self.remaining or self.remaining[0] != (method, self.counts[method]):
                return False
            self.remaining.pop(0)
            self.counts = {}
            return True
