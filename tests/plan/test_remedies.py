"""What would make a plan work: the smallest set of changes, each as mild as it can be, none that is set already."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.plan_text import advice, report
from torchgrpo.plan.problems import planned, problems
from torchgrpo.plan.remedies import Setting, remedy


def plan_of(name: str, *overrides: str, gpus: int = 1, memory: float = 80.0, **how: Any) -> Plan:
    return make_plan(
        config_of(name, *overrides), False, machine(gpus, memory, **{"host_memory_gib": 512.0} | how)
    )


def settled(plan: Plan) -> dict[str, Any]:
    found = remedy(plan, plan.machine)
    assert found is not None
    return {setting.key: setting.value for setting in found}


def test_a_plan_that_works_needs_none() -> None:
    assert settled(plan_of("grpo_gsm8k", gpus=2)) == {}


@pytest.mark.parametrize("name", ["grpo_gsm8k", "grpo_math"])
@pytest.mark.parametrize(("gpus", "memory"), [(1, 24.0), (1, 80.0), (2, 80.0)])
def test_what_is_advised_works_when_it_is_done(name: str, gpus: int, memory: float) -> None:
    where = machine(gpus, memory, host_memory_gib=512.0)
    plan, found = planned(config_of(name), False, where, Path())
    settings = remedy(plan, where)
    if settings is None:
        assert memory < 48, f"nothing helps: {[problem.text for problem in found]}"
        return
    assert works(name, where, settings)
    for left_out in settings:
        assert not works(name, where, [setting for setting in settings if setting is not left_out])


def works(name: str, where: Machine, settings: Sequence[Setting]) -> bool:
    _, found = planned(config_of(name, *map(str, settings)), False, where, Path())
    return not found


@pytest.mark.parametrize(
    ("overrides", "nodes", "expected"),
    [
        (["train_model.num_devices=4", "inference_model.num_devices=12"], 1, "inference_model.num_devices=8"),
        (["train_model.devices=[9]"], 1, "train_model.devices=null"),
        (["train_model.num_devices=8", "train_model.num_nodes=4"], 2, "train_model.num_nodes=2"),
    ],
)
def test_devices_that_the_machine_does_not_have(overrides: list[str], nodes: int, expected: str) -> None:
    where = machine(8, 80.0, host_memory_gib=512.0, nodes=nodes)
    plan, _ = planned(config_of("grpo_gsm8k", *overrides), False, where, Path())
    assert list(map(str, remedy(plan, where) or ())) == [expected]


def test_smaller_microbatches_are_named_and_no_smaller_than_needed() -> None:
    overrides = (
        "train_model.num_devices=1",
        "train.gradient_accumulation_steps=4",
        "env.max_prompt_tokens=16384",
    )
    plan = plan_of("grpo_gsm8k", *overrides, gpus=2)
    steps = settled(plan)["train.gradient_accumulation_steps"]
    assert steps > 4
    previous = next(count for count in range(steps - 1, 3, -1) if 128 % count == 0)
    milder = make_plan(
        config_of("grpo_gsm8k", *overrides, f"train.gradient_accumulation_steps={previous}"),
        False,
        plan.machine,
    )
    assert problems(milder)


def test_nothing_that_is_set_already_is_advised() -> None:
    plan = plan_of("grpo_math", "train_model.lora.enabled=true", "train_model.num_devices=1", memory=16.0)
    found = remedy(plan, plan.machine)
    keys = set() if found is None else {setting.key for setting in found}
    assert not keys & {"train_model.lora.enabled", "train.gradient_checkpointing"}


def test_too_little_disk_is_mended_by_fewer_checkpoints() -> None:
    alone = plan_of("grpo_countdown", "train.export=false", gpus=2, disk_gib=60.0)
    assert settled(alone) == {"train.keep_checkpoints": 2}
    assert settled(plan_of("grpo_countdown", gpus=2, disk_gib=60.0)) == {"train.keep_checkpoints": 1}


def test_where_nothing_helps_it_is_said() -> None:
    plan = plan_of("grpo_math", "train_model.num_devices=1", memory=4.0)
    assert remedy(plan, plan.machine) is None
    assert "take a smaller model" in advice(plan, problems(plan), plan.machine)


def test_missing_devices_leave_the_rest_of_the_table() -> None:
    """grpo_async.py on one GPU, and too little memory besides: both are told, and the whole table is there."""
    config = config_of("grpo_math", "train_model.num_devices=1")
    plan, found = planned(config, True, machine(1, 80.0), Path())
    assert "grpo_async.py works on both at once" in found[0].text
    assert any("phase optimize needs" in problem.text for problem in found)
    assert "KV cache" in report(plan, found)


def test_no_gpu_at_all_is_one_problem_among_the_others() -> None:
    plan, found = planned(config_of("grpo_gsm8k"), False, Machine(0, None, 64.0, 1.0, None), Path())
    assert "no NVIDIA GPU" in found[0].text
    assert any("checkpoints would take" in problem.text for problem in found)
    assert "engine 0" in report(plan, found)


def test_settings_read_as_the_command_line_writes_them() -> None:
    assert str(Setting("train_model.lora.enabled", True)) == "train_model.lora.enabled=true"
    assert str(Setting("policy.kl_coef", 0.0)) == "policy.kl_coef=0.0"


@pytest.mark.parametrize(("train", "generate", "unused"), [(4, 8, 0), (4, 5, 3), (1, 7, 0), (2, 2, 4)])
def test_gpus_that_nothing_is_on(train: int, generate: int, unused: int) -> None:
    """Of eight, in turns where that is too few; advice to use them is one that works."""
    overrides = (f"train_model.num_devices={train}", "policy.kl_coef=0")
    plan = make_plan(
        config_of("grpo_gsm8k", *overrides, f"inference_model.num_devices={generate}"),
        False,
        machine(8, 80.0),
    )
    said = [note for note in plan.notes if "unused" in note]
    assert [note.split()[0] for note in said] == ([str(unused)] if unused else [])
    for note in said:
        more = re.search(r"inference_model.num_devices=\d+", note)
        assert more
        better = make_plan(config_of("grpo_gsm8k", *overrides, more[0]), False, machine(8, 80.0))
        assert not [note for note in better.notes if "unused" in note]
