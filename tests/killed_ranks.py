"""Kills ranks in the middle of chosen calls. Not a test file."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.calls import Reference
from training.ranks import Ranks


class Killer:
    """Kills one rank at the begin of chosen calls, each once.

    victim: the beginning of its name. calls: (method, how many of it came since the last kill).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, victim: str, *calls: tuple[str, int]) -> None:
        self.left = list(calls)
        self.seen: dict[str, int] = {}
        begin = Ranks.begin

        def killing(ranks: Ranks, method: str, arguments: Sequence[Sequence[Any]]) -> list[Reference]:
            begun = begin(ranks, method, arguments)
            places = [place for place, name in enumerate(ranks.places) if name.name.startswith(victim)]
            if places:
                self.seen[method] = self.seen.get(method, 0) + 1
                if self.left and self.left[0] == (method, self.seen[method]):
                    self.left.pop(0)
                    self.seen = {}
                    os.kill(ranks.process_ids[places[0]], signal.SIGKILL)
            return begun

        monkeypatch.setattr(Ranks, "begin", killing)
