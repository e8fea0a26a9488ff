"""The GPU checks on a machine that has the GPUs that they ask for, as far as plans go: no CUDA is needed.

What builds a run, an engine or a learner is replaced by a stand-in that keeps the plan and goes no further.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest

from config.schema.config import Config
from tests.gpu import longer
from torchgrpo.plan import machine as real
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.problems import check as checked
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Schedule
from torchgrpo.selftest import engines, learner, runs, tiny
from torchgrpo.selftest.catalogue import CHECKS
from torchgrpo.selftest.check import Bench, Check

GPU_CHECKS = {check.name: check for check in (*CHECKS, *longer.EXTRA) if check.gpus}
AWAY = {"output head, GPU", "head as fast as a product", "push right after an update"}
"""They plan nothing."""


TRANSPORTS = {
    "nccl push": "nccl",
    "LoRA adapter to another GPU": "shared_memory",
    "in turns, engine as actor (ipc)": "ipc",
    "one GPU in turns": "in_process",
    "tensor parallel, GPUs": "nccl",
    "two engines": "nccl",
    "two learner ranks, nccl push": "nccl",
    "two learner ranks in turns": "in_process",
    "learner on GPU 1, engine on 0": "nccl",
    "transformers engine on another GPU": "shared_memory",
}


class PlannedError(Exception):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def machine_with(gpus: int) -> Machine:
    ids = tuple(map(str, range(gpus)))
    return replace(real.this_machine(Path()), num_gpus=gpus, gpu_memory_gib=79.1, gpu_ids=ids, vllm="0.32.0")


def plan_of(check: Check, folder: Path, patch: pytest.MonkeyPatch) -> Plan:
    """What the check's body would start."""
    machine = machine_with(check.gpus)

    def build(config: Config, run_dir: Path, schedule: type[Schedule]) -> NoReturn:
        raise PlannedError(checked(make_plan(config, schedule.overlapped, machine, run_dir)))

    def run_job(config: Config, run_dir: Path, train: Any, schedule: type[Schedule]) -> NoReturn:
        build(config, run_dir, schedule)

    def make_learner(config: Config, plan: Plan, run_dir: Path) -> NoReturn:
        raise PlannedError(plan)

    for place in (engines, learner):
        patch.setattr(place, "this_machine", lambda where: machine)
    patch.setattr(tiny, "build", build)
    patch.setattr(learner, "collected", lambda *arguments: MagicMock())
    patch.setattr(learner, "collate", lambda groups: MagicMock())
    for place in (learner, longer):
        patch.setattr(place, "make_learner", make_learner)
    patch.setattr(engines, "load_model", lambda config, devices: None)
    patch.setattr(engines, "vllm_settings", lambda config, *_: build(config, folder, Lockstep))
    patch.setattr(runs, "run_job", run_job)
    small = {key: value for key, value in check.options.items() if key not in ("width", "layers")}
    with pytest.raises(PlannedError) as planned:
        check.function(Bench(folder, "cuda"), **small)
    return planned.value.plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that each tiny model is written once."""
    return tmp_path_factory.mktemp("bench")


def test_the_names_are_those_of_the_catalogue() -> None:
    assert {*AWAY, *TRANSPORTS} <= set(GPU_CHECKS)


@pytest.mark.parametrize("name", [name for name in GPU_CHECKS if name not in AWAY])
def test_every_gpu_check_has_a_plan_that_works(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = plan_of(GPU_CHECKS[name], folder, monkeypatch)
    assert plan.devices.train, "the learner is on a GPU"
    used = {
        *plan.devices.train,
        *plan.reference.devices,
        *(gpu for engine in plan.devices.engines for gpu in engine),
    }
    assert len(used) == GPU_CHECKS[name].gpus or "learner." in GPU_CHECKS[name].body
    assert plan.transport == TRANSPORTS.get(name, plan.transport)
