"""Tests the search for the smallest set of changes that makes a plan work."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.plan_report import format_advice, format_plan
from torchgrpo.plan.problems import find_problems, plan_with_problems
from torchgrpo.plan.remedies import Setting, find_remedy


def plan_of(name: str, *overrides: str, gpus: int = 1, memory: float = 80.0, **machine_fields: Any) -> Plan:
    return make_plan(
        config_of(name, *overrides), False, machine(gpus, memory, **{"host_memory_gib": 512.0} | machine_fields)
    )


def remedy_values(plan: Plan) -> dict[str, Any]:
    settings = find_remedy(plan, plan.machine)
    assert settings is not None
    return {setting.key: setting.value for setting in settings}


def test_a_plan_that_works_needs_no_change() -> None:
    assert remedy_values(plan_of("grpo_gsm8k", gpus=2)) == {}


@pytest.mark.parametrize("name", ["grpo_gsm8k", "grpo_math"])
@pytest.mark.parametrize(("gpus", "memory"), [(1, 24.0), (1, 80.0), (2, 80.0)])
def test_the_advised_settings_work_and_all_are_necessary(name: str, gpus: int, memory: float) -> None:
    planned_machine = machine(gpus, memory, host_memory_gib=512.0)
    plan, problems = plan_with_problems(config_of(name), False, planned_machine, Path())
    settings = find_remedy(plan, planned_machine)
    if settings is None:
        assert memory < 48, f"nothing helps: {[problem.text for problem in problems]}"
        return
    assert is_working(name, planned_machine, settings)
    for left_out in settings:
        assert not is_working(name, planned_machine, [setting for setting in settings if setting is not left_out])


def is_working(name: str, planned_machine: Machine, settings: Sequence[Setting]) -> bool:
    _, problems = plan_with_problems(config_of(name, *map(str, settings)), False, planned_machine, Path())
    return not problems


@pytest.mark.parametrize(
    ("overrides", "nodes", "expected"),
    [
        (["train_model.num_devices=4", "inference_model.num_devices=12"], 1, "inference_model.num_devices=8"),
        (["train_model.devices=[9]"], 1, "train_model.devices=null"),
        (["train_model.num_devices=8", "train_model.num_nodes=4"], 2, "train_model.num_nodes=2"),
    ],
)
def test_a_remedy_for_missing_devices(overrides: list[str], nodes: int, expected: str) -> None:
    planned_machine = machine(8, 80.0, host_memory_gib=512.0, nodes=nodes)
    plan, _ = plan_with_problems(config_of("grpo_gsm8k", *overrides), False, planned_machine, Path())
    assert list(map(str, find_remedy(plan, planned_machine) or ())) == [expected]


def test_advised_microbatches_are_no_smaller_than_needed() -> None:
    long = ("train.gradient_accumulation_steps=4", "env.max_prompt_tokens=16384")
    overrides = ("train_model.num_devices=1", "model.dtype=float32", *long)
    plan = plan_of("grpo_gsm8k", *overrides, gpus=2)
    steps = remedy_values(plan)["train.gradient_accumulation_steps"]
    assert steps > 4
    previous = next(count for count in range(steps - 1, 3, -1) if 128 % count == 0)
    milder = make_plan(
        config_of("grpo_gsm8k", *overrides, f"train.gradient_accumulation_steps={previous}"), False, plan.machine
    )
    assert find_problems(milder)


def test_settings_in_effect_are_not_advised() -> None:
    plan = plan_of("grpo_math", "train_model.lora.enabled=true", "train_model.num_devices=1", memory=16.0)
    settings = find_remedy(plan, plan.machine)
    keys = set() if settings is None else {setting.key for setting in settings}
    assert not keys & {"train_model.lora.enabled", "train.gradient_checkpointing"}


def test_fewer_checkpoints_are_advised_for_a_small_disk() -> None:
    alone = plan_of("grpo_countdown", "train.export=false", gpus=2, disk_gib=60.0)
    assert remedy_values(alone) == {"train.keep_checkpoints": 2}
    assert remedy_values(plan_of("grpo_countdown", gpus=2, disk_gib=60.0)) == {"train.keep_checkpoints": 1}


def test_the_advice_without_a_remedy() -> None:
    plan = plan_of("grpo_math", "train_model.num_devices=1", memory=4.0)
    assert find_remedy(plan, plan.machine) is None
    assert "choose a smaller model" in format_advice(plan, find_problems(plan), plan.machine)


def test_missing_devices_leave_the_rest_of_the_table() -> None:
    """grpo_async.py on one GPU with too little memory has two problems and a complete table."""
    config = config_of("grpo_math", "train_model.num_devices=1")
    plan, problems = plan_with_problems(config, True, machine(1, 80.0), Path())
    assert "grpo_async.py runs learner and engines at the same time" in problems[0].text
    assert any("phase optimize needs" in problem.text for problem in problems)
    assert "KV cache" in format_plan(plan, problems)


def test_a_missing_gpu_is_reported_with_the_other_problems() -> None:
    plan, problems = plan_with_problems(config_of("grpo_gsm8k"), False, Machine(0, None, 64.0, 1.0, None), Path())
    assert "no NVIDIA GPU" in problems[0].text
    assert any("checkpoints would take" in problem.text for problem in problems)
    assert "engine 0" in format_plan(plan, problems)


def test_settings_have_command_line_form() -> None:
    assert str(Setting("train_model.lora.enabled", True)) == "train_model.lora.enabled=true"
    assert str(Setting("policy.kl_coef", 0.0)) == "policy.kl_coef=0.0"


@pytest.mark.parametrize(("train", "generate", "num_unused"), [(4, 8, 0), (4, 5, 3), (1, 7, 0), (2, 2, 4)])
def test_notes_about_unused_gpus(train: int, generate: int, num_unused: int) -> None:
    """The machine has eight GPUs; learner and engines take turns if that is too few.

    The advice in the note uses all GPUs.
    """
    overrides = (f"train_model.num_devices={train}", "policy.kl_coef=0")
    plan = make_plan(
        config_of("grpo_gsm8k", *overrides, f"inference_model.num_devices={generate}"), False, machine(8, 80.0)
    )
    notes = [note for note in plan.notes if "unused" in note]
    assert [note.split()[0] for note in notes] == ([str(num_unused)] if num_unused else [])
    for note in notes:
        more = re.search(r"inference_model.num_devices=\d+", note)
        assert more
        better = make_plan(config_of("grpo_gsm8k", *overrides, more[0]), False, machine(8, 80.0))
        assert not [note for note in better.notes if "unused" in note]


@pytest.mark.parametrize("bitsandbytes", ["0.50", None])
def test_adapters_over_4_bits_fit_a_small_gpu(bitsandbytes: str | None) -> None:
    """The base in 4 bits needs merged pushes, and the engine weights of 8 bits."""
    seven = "model.name=Qwen/Qwen2.5-7B-Instruct"
    plan = plan_of("grpo_gsm8k_24gb", seven, memory=23.6, bitsandbytes=bitsandbytes)
    if bitsandbytes is None:
        assert find_remedy(plan, plan.machine) is None
        return
    quantization = {"inference_model.quantization": "fp8", "train_model.lora.quantization": "nf4"}
    assert remedy_values(plan) == quantization | {"inference_model.lora": "merge"}


def test_ranks_that_share_a_microbatch_divide_the_heads() -> None:
    devices = ("train_model.num_devices=8", "inference_model.num_devices=8", "train_model.context_parallel=8")
    for model, allowed in (("Qwen/Qwen2.5-7B-Instruct", 4), ("google/gemma-3-4b-it", 1)):
        plan = plan_of("grpo_gsm8k", f"model.name={model}", *devices, gpus=8)
        assert remedy_values(plan) == {"train_model.context_parallel": allowed}


def test_the_costliest_key_has_the_mildest_value() -> None:
    """Answers are as long as the model's positions allow."""
    plan = plan_of("grpo_gsm8k", "model.name=Qwen/Qwen3-4B", "inference_model.max_tokens=40960")
    expected = {"train.gradient_accumulation_steps": 128, "inference_model.max_tokens": 40448}
    assert remedy_values(plan) == expected
