"""Engines that misbehave on purpose, for the pool's own mechanics. They draw no token from any model."""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from config.errors import ConfigError
from envs.group import SampledCompletion
from rollout.engines.sampler import Request, Response


class CountingEngine:
    """Answers a request after `delay_s` with its seed as the only token."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.policy_version = 0
        self.delay_s = delay_s
        self.requests: list[Request] = []

    @property
    def in_flight(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        if request.seed < 0:
            raise ValueError(f"request {request.request_id}: no negative seeds here")
        self.requests.append(request)

    def step(self, timeout: float) -> list[Response]:
        time.sleep(self.delay_s)
        requests, self.requests = self.requests, []
        return [Response(r.request_id, self._complete(r)) for r in requests]

    def _complete(self, request: Request) -> list[SampledCompletion]:
        one = SampledCompletion([request.seed], [0.0], [self.policy_version], "length")
        return [one for _ in range(request.n)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.policy_version = version

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[float(self.weights["sum"].sum())] * (len(sequence) - 1) for sequence in sequences]

    def transfer(self, call: str, version: int = 0) -> str:
        """A native push: the engine gets its weights by other means than `load_weights`."""
        if call == "finish_weight_update":
            self.policy_version = version
        return f"{call} done"

    def visible_gpus(self) -> str | None:
        """What CUDA would be shown in this process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def close(self) -> None:
        self.requests.clear()


class HangingOnce(CountingEngine):
    """The first engine to meet request 3 never answers it; `memory` remembers that one did."""

    def __init__(self, memory: Path) -> None:
        super().__init__()
        self.memory = memory

    def step(self, timeout: float) -> list[Response]:
        if any(request.request_id == 3 for request in self.requests) and not self.memory.exists():
            self.memory.touch()
            self.never_returns()
        return super().step(timeout)

    def never_returns(self) -> None:
        threading.Event().wait()


class HangingAlways(CountingEngine):
    def step(self, timeout: float) -> list[Response]:
        self.never_returns()
        return []

    def never_returns(self) -> None:
        threading.Event().wait()


class FailingStep(CountingEngine):
    def step(self, timeout: float) -> list[Response]:
        raise ArithmeticError("the sampler met a NaN")


class FailingStart(CountingEngine):
    def __init__(self) -> None:
        raise OSError("no weights in this folder")


class RefusingStart(CountingEngine):
    def __init__(self) -> None:
        raise ConfigError("model.name=nowhere: not found; give a folder")


class SlowStart(CountingEngine):
    """Never starts; leaves a file in `folder` when it comes to where it waits."""

    def __init__(self, folder: Path) -> None:
        (folder / f"waits_{os.getpid()}").touch()
        self.waits_for_a_download()

    def waits_for_a_download(self) -> None:
        threading.Event().wait()


class SlowAgain(CountingEngine):
    """Starts as often as told, then never; `folder` remembers how often that was."""

    def __init__(self, folder: Path, starts: int) -> None:
        super().__init__()
        (folder / f"started_{os.getpid()}").touch()
        if len(list(folder.iterdir())) > starts:
            threading.Event().wait()
