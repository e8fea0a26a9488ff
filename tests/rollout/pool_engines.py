"""Fake engines that fail, hang or are slow, for tests of the engine pool.

They sample no token from a model.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from config.schema.errors import ConfigError
from envs.group import SINGLE_ENGINE_NAME, SampledCompletion
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.weights.weight_update import LiveEngines, WeightUpdate


class CountingEngine:
    """Engine that answers a request after `delay_s`, with the request's seed as the only token."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.policy_version = 0
        self.loaded_names: frozenset[str] = frozenset()
        self.delay_s = delay_s
        self.requests: list[Request] = []

    @property
    def in_flight(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        if request.seed < 0:
            raise ValueError(f"request {request.request_id}: no negative seeds here")
        self.requests.append(request)

    def cancel(self, request_id: int) -> None:
        self.requests = [one for one in self.requests if one.request_id != request_id]

    def step(self, timeout: float) -> list[Response]:
        time.sleep(self.delay_s)
        requests, self.requests = self.requests, []
        return [Response(r.request_id, self._complete(r)) for r in requests]

    def _complete(self, request: Request) -> list[SampledCompletion]:
        one = SampledCompletion([request.seed], [0.0], [self.policy_version], "length")
        return [one for _ in range(request.n)]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.loaded_names = frozenset(self.weights)
        self.policy_version, self.last_push_path = version, "copy"

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        value = float(self.weights["sum"].sum())
        return {SINGLE_ENGINE_NAME: [[value] * (len(sequence) - 1) for sequence in sequences]}

    def transfer(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Takes weights of a direct transfer, without `load`."""
        self.weights, self.policy_version, self.last_push_path = weights, version, "direct"

    def push_path(self) -> str:
        """Returns how the last push arrived: `copy` or `direct`."""
        return self.last_push_path

    def sleep(self) -> None: ...
    def wake(self) -> None: ...

    def visible_gpus(self) -> str | None:
        """Returns the GPUs that are visible to CUDA in this process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def close(self) -> None:
        self.requests.clear()


class CallTransfer:
    """Direct transfer without GPUs: the tensors are arguments of a call to every live engine.

    method: of the engines. on_push: called with the version when a push begins.
    """

    def __init__(self, method: str = "transfer", on_push: Callable[[int], None] = lambda version: None) -> None:
        self.method = method
        self.on_push = on_push

    def push(self, weights: WeightUpdate, version: int, engines: LiveEngines) -> None:
        self.on_push(version)
        carried: dict[str, Any] = {"weights": {name: tensor.clone() for name, tensor in weights}, "version": version}
        if self.method == "load":
            carried["weights"] = list(carried["weights"].items())
        engines.call_each(self.method, [carried] * len(engines.engine_pids))


class HangingOnceEngine(CountingEngine):
    """Engine that hangs at request 3, unless the file `marker` exists, which it creates."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def step(self, timeout: float) -> list[Response]:
        if any(request.request_id == 3 for request in self.requests) and not self.marker.exists():
            self.marker.touch()
            self.never_returns()
        return super().step(timeout)

    def never_returns(self) -> None:
        threading.Event().wait()


class HangingEngine(CountingEngine):
    def step(self, timeout: float) -> list[Response]:
        self.never_returns()
        return []

    def never_returns(self) -> None:
        threading.Event().wait()


class SlowLoadEngine(CountingEngine):
    """Engine whose load takes half a second.

    It records the sum of the weights before and after the wait.
    """

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


class FailingStepEngine(CountingEngine):
    def step(self, timeout: float) -> list[Response]:
        raise ArithmeticError("the sampler met a NaN")


class FailingStartEngine(CountingEngine):
    def __init__(self) -> None:
        raise OSError("no weights in this folder")


class ConfigErrorEngine(CountingEngine):
    def __init__(self) -> None:
        raise ConfigError("model.name=nowhere: not found; give a folder")


class NeverStartingEngine(CountingEngine):
    """Engine that never starts; it creates a file in `folder` when it begins to wait."""

    def __init__(self, folder: Path) -> None:
        (folder / f"waits_{os.getpid()}").touch()
        self.waits_for_a_download()

    def waits_for_a_download(self) -> None:
        threading.Event().wait()


class SlowRestartEngine(CountingEngine):
    """Engine that starts `starts` times, counted by files in `folder`, and then never."""

    def __init__(self, folder: Path, starts: int) -> None:
        super().__init__()
        (folder / f"started_{os.getpid()}").touch()
        if len(list(folder.iterdir())) > starts:
            threading.Event().wait()
