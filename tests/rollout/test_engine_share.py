"""Tests of a plan's GPU share of an engine against vLLM's check of free memory."""

from dataclasses import replace
from typing import Any

import pytest

from config.schema.config import Config
from config.schema.errors import ConfigError
from tests.script_runner import compose_run_config
from torchgrpo.plan.machine import Machine, installed_vllm
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import CONTEXT_BYTES, engine_weight_bytes, engine_work_bytes
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan, resident_bytes
from torchgrpo.plan.problems import check_plan

pytestmark = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")

CARDS = (24.0, 39.5, 47.5, 79.1, 139.8)  # GiB that drivers report for GPUs of 24, 40, 48, 80 and 141 GB
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


def plan_or_none(config: Config, card: float, model: str) -> Plan | None:
    machine = Machine(1, card, 1024.0, 4096.0, "0.32.0", gpu_ids=("0",))
    config = replace(config, model=replace(config.model, name=f"Qwen/Qwen2.5-{model}-Instruct"))
    try:
        return check_plan(make_plan(config, False, machine))
    except ConfigError:
        return None


def memory_at_start(plan: Plan, card: float) -> Any:
    """Returns the memory that a learner with optimizer state leaves, without CUDA's own context."""
    from vllm.utils.mem_utils import MemorySnapshot

    assert plan.shape is not None
    total = int(card * GIB)
    free = int(total - resident_bytes(plan, plan.shape) - CONTEXT_BYTES)
    return MemorySnapshot(total_memory=total, free_memory=free, device="cpu", auto_measure=False)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way) or "full")
def test_vllm_starts_and_wakes_on_every_shared_gpu_that_a_plan_accepts(way: tuple[str, ...]) -> None:
    """The first start has more free memory than later ones, after the optimizer state exists."""
    from vllm.config import CacheConfig
    from vllm.v1.worker.utils import request_memory

    found, bounded, config = 0, 0, compose_run_config(*way, name="grpo_gsm8k")
    for card in CARDS:
        for model in MODELS:
            plan = plan_or_none(config, card, model)
            if plan is None:
                continue
            assert plan.devices.colocated and plan.shape is not None
            snapshot = memory_at_start(plan, card)
            cache = CacheConfig(gpu_memory_utilization=plan.engine.gpu_memory_utilization)
            assert request_memory(snapshot, cache) <= snapshot.free_memory
            if plan.engine.kv_cache_bytes is not None:  # vLLM does not check this
                engine = plan.engine
                weights = engine_weight_bytes(config, plan.shape, engine.dtype, on_cpu=False)
                work = engine_work_bytes(plan.shape, engine.max_num_batched_tokens or 0, engine.max_num_seqs, 1)
                assert plan.engine.kv_cache_bytes + weights + work <= snapshot.free_memory
                bounded += 1
            found += 1
    assert found >= 4 and bounded, "plans that are all refused, or leave the cache to vLLM, show nothing"


def test_vllm_refuses_what_the_plan_has_lowered() -> None:
    from vllm.config import CacheConfig
    from vllm.v1.worker.utils import request_memory

    plan = plan_or_none(compose_run_config(name="grpo_gsm8k"), 79.1, "3B")
    assert plan is not None
    asked = plan.config.inference_model.gpu_memory_utilization
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(memory_at_start(plan, 79.1), CacheConfig(gpu_memory_utilization=asked))
    assert plan.engine.sleeps and plan.engine.gpu_memory_utilization < asked
    start = "inference_model.gpu_memory_utilization=0.9: the engine gets only"
    assert any(note.startswith(start) for note in plan.notes)


def test_an_engine_that_takes_turns_has_no_larger_cache_than_it_uses() -> None:
    """Sleep and wake release and allocate the whole cache each time."""
    # Tokens, layers, keys and values, heads, head width, bytes of bfloat16.
    one = 1536 * 36 * 2 * 2 * 128 * 2

    def cache(gpus: int, card: float, *overrides: str) -> int | None:
        overrides = ("model.name=Qwen/Qwen2.5-3B-Instruct", "inference_model.sleep=true", *overrides)
        config = compose_run_config(*overrides, name="grpo_gsm8k")
        machine = Machine(gpus, card, 1024.0, 4096.0, "0.32.0", gpu_ids=tuple(map(str, range(gpus))))
        return make_plan(config, False, machine).engine.kv_cache_bytes

    assert cache(1, 139.8) == 2 * 512 * one
    assert cache(1, 139.8, "inference_model.max_num_seqs=64") == 2 * 64 * one
    assert cache(1, 139.8, "inference_model.max_num_seqs=1") == GIB
    assert cache(1, 139.8, "inference_model.kv_cache_gib=3") == 3 * GIB
    assert cache(1, 79.1) is None, "vLLM measures what is left, which is not much more"
    assert cache(2, 139.8) is None, "it never sleeps"
    both = ("train_model.num_devices=2", "inference_model.num_devices=2", "inference_model.tensor_parallel_size=2")
    assert cache(2, 139.8, *both) == 2 * 512 * one, "of both devices together"
