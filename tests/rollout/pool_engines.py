"""Engines that misbehave on purpose, for the pool's own mechanics. They draw no token from any model."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from config.schema.errors import ConfigError
from envs.group import ALONE, SampledCompletion
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.weights.outgoing import Engines, Outgoing


class CountingEngine:
    """Answers a request after `delay_s` with its seed as the only token."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.policy_version = 0
        self.received: frozenset[str] = frozenset()
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

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.received = frozenset(self.weights)
        self.policy_version, self.way = version, "copy"

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        value = float(self.weights["sum"].sum())
        return {ALONE: [[value] * (len(sequence) - 1) for sequence in sequences]}

    def transfer(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """A native push: the engine gets its weights by other means than `load`."""
        self.weights, self.policy_version, self.way = weights, version, "direct"

    def came_by(self) -> str:
        """The way of its weights."""
        return self.way

    def sleep(self) -> None: ...
    def wake(self) -> None: ...

    def visible_gpus(self) -> str | None:
        """What CUDA would be shown in this process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def close(self) -> None:
        self.requests.clear()


class HandCarried:
    """In the place of `nccl`, which needs GPUs: the tensors are arguments of a call to every live engine.

    method: of the engines. before: called with the version when a push begins.
    """

    def __init__(
        self, method: str = "transfer", before: Callable[[int], None] = lambda version: None
    ) -> None:
        self.method = method
        self.before = before

    def push(self, weights: Outgoing, version: int, engines: Engines) -> None:
        self.before(version)
        carried: dict[str, Any] = {
            "weights": {name: tensor.clone() for name, tensor in weights},
            "version": version,
        }
        if self.method == "load":
            carried["weights"] = list(carried["weights"].items())
        engines.call_each(self.method, [carried] * len(engines.members))


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


class SlowLoad(CountingEngine):
    """Says what it reads of the weights in memory when it begins and, half a second later, before it ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        ((name, tensor),) = weights
        first, note = tensor.sum().item(), self.folder / "reading"
        note.touch()
        time.sleep(0.5)
        note.write_text(f"{first} {tensor.sum().item()}")
        super().load([(name, tensor)], version)


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
