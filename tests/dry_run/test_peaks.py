"""Compares the peak memory of plan and dry run for each shipped config.

Each config runs on the machine that its header comment names.
"""

import pytest

from config.cli.composition import CONFIG_DIR, to_config
from tests.config_composition import compose_config
from tests.plan.test_plan import config_of, machine
from tests.plan.test_recorded_plans import named_machine
from tests.plans import gpu_configs
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.model_shape import GIB
from torchgrpo.run.dry_run.dry_run_report import oversized_phases
from torchgrpo.run.dry_run.step import dry_run_peaks, peak_bytes

pytestmark = pytest.mark.long

TOLERANCE, CPU_TOLERANCE = 0.03, 0.1
ENVIRONMENT_CONFIGS = {"grpo_sums_with_hints", "grpo_products_by_tool", "grpo_debugging"}
CPU_CONFIGS = {"grpo_quickstart", "grpo_smollm2"} | ENVIRONMENT_CONFIGS
GPU_CONFIGS = sorted({path.stem for path in CONFIG_DIR.glob("grpo_*.yaml")} - CPU_CONFIGS)


def test_each_gpu_config_has_a_dry_run() -> None:
    assert sorted(gpu_configs()) == GPU_CONFIGS


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_the_planned_peak_of_a_shipped_config(name: str) -> None:
    plan = make_plan(to_config(compose_config(name)), False, named_machine(name))
    peaks = dry_run_peaks(plan)
    planned_bytes = max(phase.bytes for phase in plan.phases)
    print(f"{name}: plan {planned_bytes / GIB:.2f} GiB, dry run {peak_bytes(peaks) / GIB:.2f}")
    assert planned_bytes == pytest.approx(peak_bytes(peaks), rel=TOLERANCE)
    assert not oversized_phases(plan, peaks)


COPY_OVERRIDES = {
    "float32": ("train_model.shard_size=1",),
    "pairs": ("train_model.shard_size=2",),
    "bfloat16": ("train_model.shard_size=1", "model.dtype=bfloat16"),
    "on the host": ("train_model.shard_size=2", "train_model.offload=all"),
    "one microbatch": ("train_model.shard_size=2", "train.gradient_accumulation_steps=1"),
    "shared microbatches": ("train_model.context_parallel=2", "train_model.shard_size=2"),
    "adapters of shared microbatches": ("train_model.context_parallel=2", "train_model.lora.enabled=true"),
    "adapters": ("train_model.shard_size=1", "train_model.lora.enabled=true"),
}


@pytest.mark.parametrize("overrides", COPY_OVERRIDES.values(), ids=COPY_OVERRIDES)
def test_the_planned_peak_with_copies_of_the_parameters(overrides: tuple[str, ...]) -> None:
    plan = make_plan(config_of("grpo_gsm8k", "train_model.num_devices=4", *overrides), False, machine(8, 80.0))
    planned_bytes = max(phase.bytes for phase in plan.phases)
    assert planned_bytes == pytest.approx(peak_bytes(dry_run_peaks(plan)), rel=TOLERANCE)


SCHEDULES = ("prefetch_layers=4", "reshard_after_forward=false")


@pytest.mark.parametrize("setting", SCHEDULES)
def test_the_planned_peak_with_layers_gathered_longer(setting: str) -> None:
    overrides = ("train_model.num_devices=4", f"train_model.{setting}")
    plan = make_plan(config_of("grpo_gsm8k", *overrides), False, machine(8, 80.0))
    planned_bytes = max(phase.bytes for phase in plan.phases)
    assert planned_bytes == pytest.approx(peak_bytes(dry_run_peaks(plan)), rel=TOLERANCE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_planned_peak_of_the_quickstart_on_a_cpu(ranks: int) -> None:
    config = config_of("grpo_quickstart", f"train_model.num_devices={ranks}")
    plan = make_plan(config, False, machine(0))
    planned_bytes = max(phase.bytes for phase in plan.phases)
    assert planned_bytes == pytest.approx(peak_bytes(dry_run_peaks(plan)), rel=CPU_TOLERANCE)
