"""Fake engine of a pool that answers when the test creates a file."""

import time
from pathlib import Path

from tests.rollout.pool_engines import CountingEngine
from torchgrpo.rollout.engines.interface import Request, Response


class GatedEngine(CountingEngine):
    """Engine that answers request N once `folder` has a file `answer_N`.

    A submission creates `received_N`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def submit(self, request: Request) -> None:
        super().submit(request)
        (self.folder / f"received_{request.request_id}").touch()

    def step(self, timeout: float) -> list[Response]:
        time.sleep(0.001)
        done = [one for one in self.requests if (self.folder / f"answer_{one.request_id}").exists()]
        self.requests = [one for one in self.requests if one not in done]
        return [Response(one.request_id, self._complete(one)) for one in done]

    def request_ids(self) -> list[int]:
        """Returns the ids of the requests that the engine holds."""
        return [one.request_id for one in self.requests]
