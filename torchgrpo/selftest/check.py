"""Records of the self-test: a check with its requirements, its workspace, and its result."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchgrpo.plan.machine import Machine

CheckStatus = Literal["passed", "failed", "timed out", "skipped"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class CheckWorkspace:
    """Folder and device of a check.

    folder: an empty folder for the check alone. device: device of the learner and of engines beside it.
    """

    folder: Path
    device: Device = "cpu"


CheckBody = Callable[..., str]
"""Takes a `CheckWorkspace` and the check's options; returns a short summary. Raises an exception on failure."""


@dataclass(frozen=True)
class Check:
    """Check of one feature, small enough to run in a minute.

    name: name in the table. body: "module.function" of a module in this package, or a full dotted path.
    options: further arguments of the body. device: device of the check. gpus: number of GPUs that the check
    needs. vllm: whether it needs vLLM, built for `device`. remedy: advice for a failure. seconds: deadline.
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
        """Name of the group of checks that share a process.

        An engine on a GPU takes most of its memory, so its check is a group of its own.
        """
        return self.name if self.vllm and self.gpus else f"{self.body.rpartition('.')[0]} {self.device}"

    @property
    def function(self) -> CheckBody:
        """The body's function."""
        module, _, name = self.body.rpartition(".")
        path = module if "." in module else f"torchgrpo.selftest.{module}"
        function: CheckBody = vars(importlib.import_module(path))[name]
        return function

    def missing_requirement(self, machine: Machine, vllm_build: Device | None) -> str | None:
        """Returns a requirement that this machine lacks; None if the check can run."""
        if self.gpus > machine.num_gpus:
            return f"needs {self.gpus} GPU{'s' * (self.gpus > 1)}, this machine shows {machine.num_gpus}"
        if not self.vllm or vllm_build == self.device:
            return None
        if vllm_build is None:
            return "needs vLLM, which is not installed (`make vllm`)"
        return f"needs the {self.device.upper()} build of vLLM, installed is the {vllm_build.upper()} build"


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    detail: summary of a success, or reason of a failure. trace: end of the output.
    """

    name: str
    status: CheckStatus
    seconds: float
    detail: str
    remedy: str = ""
    trace: str = ""
