"""`run=plan`'s own peak against the rehearsed one, for every shipped config on the machine that its head names."""

import pytest

from config.cli.composition import CONFIG_DIR, to_config
from tests.composed import composed
from tests.plan.test_plan import config_of, machine
from tests.plan.test_recorded_plans import named_machine
from tests.plans import configs
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.model_shape import GIB
from torchgrpo.run.rehearsal.rehearsal_text import too_large
from torchgrpo.run.rehearsal.step import peak, rehearse_memory

pytestmark = pytest.mark.long

CLOSE, CLOSE_ON_A_CPU = 0.03, 0.1
ON_CPUS = {"grpo_quickstart", "grpo_smollm2"}
SHIPPED = sorted({path.stem for path in CONFIG_DIR.glob("grpo_*.yaml")} - ON_CPUS)


def test_all_that_want_a_gpu_are_rehearsed() -> None:
    assert sorted(configs()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_the_plan_of_a_shipped_config_is_what_its_step_takes(name: str) -> None:
    plan = make_plan(to_config(composed(name)), False, named_machine(name))
    peaks = rehearse_memory(plan)
    planned = max(phase.bytes for phase in plan.phases)
    print(f"{name}: plan {planned / GIB:.2f} GiB, rehearsed {peak(peaks) / GIB:.2f}")
    assert planned == pytest.approx(peak(peaks), rel=CLOSE)
    assert not too_large(plan, peaks)


COPIES = {
    "float32": ("train_model.shard_size=1",),
    "pairs": ("train_model.shard_size=2",),
    "bfloat16": ("train_model.shard_size=1", "model.dtype=bfloat16"),
    "on the host": ("train_model.shard_size=2", "train_model.offload=all"),
    "one microbatch": ("train_model.shard_size=2", "train.gradient_accumulation_steps=1"),
    "adapters": ("train_model.shard_size=1", "train_model.lora.enabled=true"),
}


@pytest.mark.parametrize("overrides", COPIES.values(), ids=COPIES)
def test_copies_of_the_parameters_take_what_the_plan_says(overrides: tuple[str, ...]) -> None:
    plan = make_plan(
        config_of("grpo_gsm8k", "train_model.num_devices=4", *overrides), False, machine(8, 80.0)
    )
    planned = max(phase.bytes for phase in plan.phases)
    assert planned == pytest.approx(peak(rehearse_memory(plan)), rel=CLOSE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quickstart_on_a_cpu(ranks: int) -> None:
    config = config_of("grpo_quickstart", f"train_model.num_devices={ranks}")
    plan = make_plan(config, False, machine(0))
    planned = max(phase.bytes for phase in plan.phases)
    assert planned == pytest.approx(peak(rehearse_memory(plan)), rel=CLOSE_ON_A_CPU)
