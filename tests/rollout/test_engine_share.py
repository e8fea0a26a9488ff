"""The share of a GPU that a plan gives an engine, put before vLLM's own check of free memory."""

from dataclasses import replace

import pytest

from config.errors import ConfigError
from config.schema import Config
from plan.machine import Machine, installed_vllm
from plan.memory import CONTEXT_BYTES
from plan.model_shape import GIB
from plan.plan import Plan, make_plan, resident
from plan.problems import check
from tests.scripts import configured

pytestmark = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")

CARDS = (24.0, 39.5, 47.5, 79.1, 139.8)  # what drivers say of cards named 24, 40, 48, 80 and 141 GB
MODELS = ("0.5B", "1.5B", "3B", "7B", "14B")
WAYS: tuple[tuple[str, ...], ...] = (
    (),
    ("train_model.lora.enabled=true",),
    ("train_model.lora.enabled=true", "inference_model.lora=adapter"),
    ("policy.kl_coef=0",),
    ("model.dtype=bfloat16",),
    ("inference_model.gpu_memory_utilization=0.5",),
    ("ray.enabled=true",),
)


def accepted(config: Config, card: float, model: str) -> Plan | None:
    machine = Machine(1, card, 1024.0, 4096.0, "0.32.0", gpu_ids=("0",))
    config = replace(config, model=replace(config.model, name=f"Qwen/Qwen2.5-{model}-Instruct"))
    try:
        return check(make_plan(config, False, machine))
    except ConfigError:
        return None


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way) or "full")
def test_vllm_starts_and_wakes_on_every_shared_gpu_that_a_plan_accepts(way: tuple[str, ...]) -> None:
    """What is free is what the learner leaves once its optimizer state is there, CUDA's own context taken off: at the
    first start there is more."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    found, config = 0, configured(*way, name="grpo_gsm8k")
    for card in CARDS:
        for model in MODELS:
            plan = accepted(config, card, model)
            if plan is None:
                continue
            assert plan.devices.colocated and plan.shape is not None
            total = int(card * GIB)
            free = int(total - resident(plan, plan.shape) - CONTEXT_BYTES)
            snapshot = MemorySnapshot(total_memory=total, free_memory=free, device="cpu", auto_measure=False)
            cache = CacheConfig(gpu_memory_utilization=plan.engine.gpu_memory_utilization)
            assert request_memory(snapshot, cache) <= free
            found += 1
    assert found >= 4, "plans that are all refused prove nothing"


def test_vllm_refuses_what_the_plan_has_lowered() -> None:
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    plan = accepted(configured(name="grpo_gsm8k"), 79.1, "3B")
    assert plan is not None and plan.shape is not None
    total = int(79.1 * GIB)
    free = int(total - resident(plan, plan.shape) - CONTEXT_BYTES)
    snapshot = MemorySnapshot(total_memory=total, free_memory=free, device="cpu", auto_measure=False)
    asked = plan.config.inference_model.gpu_memory_utilization
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(snapshot, CacheConfig(gpu_memory_utilization=asked))
    assert plan.engine.gpu_memory_utilization < asked
    assert any("of the GPU and not inference_model.gpu_memory_utilization=0.9" in note for note in plan.notes)
