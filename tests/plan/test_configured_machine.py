"""Tests plans for a machine that `machine.gpus` describes, which ignore this machine."""

from tests.script_runner import compose_run_config
from torchgrpo.plan.machine import Machine, configured_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan_report import format_plan
from torchgrpo.plan.problems import Problem, find_problems

LOCAL_MACHINE = Machine(0, None, host_memory_gib=24.0, disk_gib=100.0, vllm=None)


def test_another_machine_needs_no_cluster_of_this_one() -> None:
    config = compose_run_config("run=plan", "machine.gpus=64", "machine.nodes=8", name="grpo_dapo")
    plan = make_plan(config, False, configured_machine(config.machine, LOCAL_MACHINE))
    assert config.ray.address is None
    assert plan.devices.on_cluster
    shown = format_plan(plan, find_problems(plan))
    assert "host memory not known (machine.host_memory_gib), free disk not known (machine.disk_gib)" in shown
    assert "of an unknown size  [machine.host_memory_gib]" in shown


def test_a_cluster_of_this_machine_is_not_that_of_another() -> None:
    config = compose_run_config("run=plan", "machine.gpus=2", "ray.address=auto", name="grpo_gsm8k")
    assert not make_plan(config, False, configured_machine(config.machine, LOCAL_MACHINE)).devices.on_cluster


def test_the_example_of_the_readme_fits() -> None:
    config = compose_run_config("run=plan", "machine.gpus=8", "machine.gpu_memory_gib=80", name="grpo_gsm8k")
    assert not find_problems(make_plan(config, False, configured_machine(config.machine, LOCAL_MACHINE)))


def test_a_phase_that_does_not_fit_marks_its_own_line_alone() -> None:
    config = compose_run_config("run=plan", "machine.gpus=8", "machine.gpu_memory_gib=80", name="grpo_gsm8k")
    plan = make_plan(config, False, configured_machine(config.machine, LOCAL_MACHINE))
    shown = format_plan(plan, [Problem("optimizer step", "does not fit")])
    (marked,) = [line for line in shown.splitlines() if line.endswith("does not fit")]
    assert "GiB" in marked
