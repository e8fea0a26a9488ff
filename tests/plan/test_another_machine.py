"""Plans for a machine that `plan.gpus` describes: nothing of this one counts."""

from tests.scripts import configured
from torchgrpo.plan.machine import Machine, imagined_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan_text import report
from torchgrpo.plan.problems import Problem, problems

HERE = Machine(0, None, host_memory_gib=24.0, disk_gib=100.0, vllm=None)


def test_another_machine_needs_no_cluster_of_this_one() -> None:
    config = configured("run=plan", "plan.gpus=64", "plan.nodes=8", name="grpo_dapo")
    plan = make_plan(config, False, imagined_machine(config.plan, HERE))
    assert config.ray.address is None
    assert plan.devices.on_cluster
    shown = report(plan, problems(plan))
    assert "host memory not known (plan.host_memory_gib), free disk not known (plan.disk_gib)" in shown
    assert "of an unknown size  [plan.host_memory_gib]" in shown


def test_a_cluster_of_this_machine_is_not_that_of_another() -> None:
    config = configured("run=plan", "plan.gpus=2", "ray.address=auto", name="grpo_gsm8k")
    assert not make_plan(config, False, imagined_machine(config.plan, HERE)).devices.on_cluster


def test_the_example_of_the_readme_fits() -> None:
    config = configured("run=plan", "plan.gpus=8", "plan.gpu_memory_gib=80", name="grpo_gsm8k")
    assert not problems(make_plan(config, False, imagined_machine(config.plan, HERE)))


def test_a_phase_that_does_not_fit_marks_its_own_line_alone() -> None:
    config = configured("run=plan", "plan.gpus=8", "plan.gpu_memory_gib=80", name="grpo_gsm8k")
    plan = make_plan(config, False, imagined_machine(config.plan, HERE))
    shown = report(plan, [Problem("optimizer step", "does not fit")])
    (marked,) = [line for line in shown.splitlines() if line.endswith("does not fit")]
    assert "GiB" in marked
