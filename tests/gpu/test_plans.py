"""Plans of the GPU checks on a simulated machine with enough GPUs.

No CUDA is needed. Functions that build a run, an engine or a learner are replaced by fakes that keep the plan
and stop.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest

from config.schema.config import Config
from tests.gpu import long_gpu_checks
from torchgrpo.plan import machine as machine_module
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.problems import check_plan
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import Schedule
from torchgrpo.selftest import engine_checks, learner_checks, tiny_model, training_run_checks
from torchgrpo.selftest.catalogue import CHECKS
from torchgrpo.selftest.check import Check, CheckWorkspace

GPU_CHECKS = {check.name: check for check in (*CHECKS, *long_gpu_checks.EXTRA) if check.gpus}
WITHOUT_PLAN = {"output head, GPU", "head as fast as a product", "push right after an update"}
"""Checks without a plan."""


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
    """Ends a check with the plan that it made."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def machine_with(gpus: int) -> Machine:
    ids = tuple(map(str, range(gpus)))
    return replace(machine_module.this_machine(Path()), num_gpus=gpus, gpu_memory_gib=79.1, gpu_ids=ids, vllm="0.32.0")


def plan_of(check: Check, folder: Path, patch: pytest.MonkeyPatch) -> Plan:
    """Returns the plan that the check's body would start."""
    machine = machine_with(check.gpus)

    def build(config: Config, run_dir: Path, schedule: type[Schedule]) -> NoReturn:
        raise PlannedError(check_plan(make_plan(config, schedule.is_overlapped, machine, run_dir)))

    def run_job(config: Config, run_dir: Path, train: Any, schedule: type[Schedule]) -> NoReturn:
        build(config, run_dir, schedule)

    def make_learner(config: Config, plan: Plan, run_dir: Path) -> NoReturn:
        raise PlannedError(plan)

    for module in (engine_checks, learner_checks):
        patch.setattr(module, "this_machine", lambda run_dir: machine)
    patch.setattr(tiny_model, "build_run", build)
    patch.setattr(learner_checks, "collect_groups", lambda *arguments: MagicMock())
    patch.setattr(learner_checks, "collate", lambda groups: MagicMock())
    for module in (learner_checks, long_gpu_checks):
        patch.setattr(module, "make_learner", make_learner)
    patch.setattr(engine_checks, "load_model", lambda config, devices: None)
    patch.setattr(engine_checks, "make_vllm_settings", lambda config, *_: build(config, folder, LockstepRun))
    patch.setattr(training_run_checks, "run_job", run_job)
    small = {key: value for key, value in check.options.items() if key not in ("width", "layers")}
    with pytest.raises(PlannedError) as planned:
        check.function(CheckWorkspace(folder, "cuda"), **small)
    return planned.value.plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all tests, so that each tiny model is written once."""
    return tmp_path_factory.mktemp("bench")


def test_the_names_are_those_of_the_catalogue() -> None:
    assert {*WITHOUT_PLAN, *TRANSPORTS} <= set(GPU_CHECKS)


@pytest.mark.parametrize("name", [name for name in GPU_CHECKS if name not in WITHOUT_PLAN])
def test_every_gpu_check_has_a_plan_that_works(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = plan_of(GPU_CHECKS[name], folder, monkeypatch)
    assert plan.devices.train, "the learner is on a GPU"
    used = {*plan.devices.train, *plan.reference.devices, *(gpu for engine in plan.devices.engines for gpu in engine)}
    assert len(used) == GPU_CHECKS[name].gpus or "learner_checks." in GPU_CHECKS[name].body
    assert plan.transport == TRANSPORTS.get(name, plan.transport)
