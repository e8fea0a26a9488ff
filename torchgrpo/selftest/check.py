"""A check, what it needs of the machine, and its outcome."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchgrpo.plan.machine import Machine

Status = Literal["works", "does not", "timed out", "not here"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Bench:
    """The place of a check. folder: empty, its own. device: of the learner, and of engines beside it."""

    folder: Path
    device: Device = "cpu"


Body = Callable[..., str]
"""Takes a `Bench` and the check's options; says what was measured, in a few words. Raises when it does not work."""


@dataclass(frozen=True)
class Check:
    """One path through the project, small enough to try in a minute.

    name: as the table shows it. body: "module.function", the module in this package; a dotted path where it is not.
    options: further arguments of the body. device: that it runs on. gpus: that it needs. vllm: whether it needs
    vLLM, built for `device`. remedy: what a user can do where it does not work. seconds: its deadline, generous.
    """

    name: str
    body: str
    options: dict[str, object] = field(default_factory=dict)
    device: Device = "cpu"
    gpus: int = 0
    vllm: bool = False
    remedy: str = ""
    seconds: float = 600.0

    @property
    def group(self) -> str:
        """The group that shares a process. An engine on a GPU, which takes most memory, is alone."""
        return self.name if self.vllm and self.gpus else f"{self.body.rpartition('.')[0]} {self.device}"

    @property
    def function(self) -> Body:
        module, _, name = self.body.rpartition(".")
        place = module if "." in module else f"torchgrpo.selftest.{module}"
        found: Body = vars(importlib.import_module(place))[name]
        return found

    def missing(self, machine: Machine, vllm_build: Device | None) -> str | None:
        """Names what this machine lacks for it; None where it can be tried."""
        if self.gpus > machine.num_gpus:
            return f"needs {self.gpus} GPU{'s' * (self.gpus > 1)}, this machine shows {machine.num_gpus}"
        if not self.vllm or vllm_build == self.device:
            return None
        if vllm_build is None:
            return "needs vLLM, which is not installed (`make vllm`)"
        return f"needs the {self.device.upper()} build of vLLM, installed is the {vllm_build.upper()} build"


@dataclass(frozen=True)
class Row:
    """The outcome of a check. detail: what it measured, or why it does not work. trace: the end of its output."""

    name: str
    status: Status
    seconds: float
    detail: str
    remedy: str = ""
    trace: str = ""
