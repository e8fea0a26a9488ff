"""The share of a GPU that a plan gives an engine, put before vLLM's own check of free memory."""

from dataclasses import replace
from typing import Any

import pytest

from config.schema.config import Config
from config.schema.errors import ConfigError
from tests.scripts import configured
from torchgrpo.plan.machine import Machine, installed_vllm
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import CONTEXT_BYTES, engine_weights, engine_work_bytes
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan, resident
from torchgrpo.plan.problems import check

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


def at_start(plan: Plan, card: float) -> Any:
    """What is free is what the learner leaves once its optimizer state is there, CUDA's own context taken off."""
    from vllm.utils.mem_utils import MemorySnapshot

    assert plan.shape is not None
    total = int(card * GIB)
    free = int(total - resident(plan, plan.shape) - CONTEXT_BYTES)
    return MemorySnapshot(total_memory=total, free_memory=free, device="cpu", auto_measure=False)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way) or "full")
def test_vllm_starts_and_wakes_on_every_shared_gpu_that_a_plan_accepts(way: tuple[str, ...]) -> None:
    """At the first start there is more than at those where the learner has its optimizer state."""
    from vllm.config import CacheConfig
    from vllm.v1.worker.utils import request_memory

    found, bounded, config = 0, 0, configured(*way, name="grpo_gsm8k")
    for card in CARDS:
        for model in MODELS:
            plan = accepted(config, card, model)
            if plan is None:
                continue
            assert plan.devices.colocated and plan.shape is not None
            snapshot = at_start(plan, card)
            cache = CacheConfig(gpu_memory_utilization=plan.engine.gpu_memory_utilization)
            assert request_memory(snapshot, cache) <= snapshot.free_memory
            if plan.engine.kv_cache_bytes is not None:  # vLLM does not look whether it fits
                engine = plan.engine
                weights = engine_weights(config, plan.shape, engine.dtype, on_cpu=False)
                work = engine_work_bytes(
                    plan.shape, engine.max_num_batched_tokens or 0, engine.max_num_seqs, 1
                )
                assert plan.engine.kv_cache_bytes + weights + work <= snapshot.free_memory
                bounded += 1
            found += 1
    assert found >= 4 and bounded, "plans that are all refused, or leave the cache to vLLM, prove nothing"


def test_vllm_refuses_what_the_plan_has_lowered() -> None:
    from vllm.config import CacheConfig
    from vllm.v1.worker.utils import request_memory

    plan = accepted(configured(name="grpo_gsm8k"), 79.1, "3B")
    assert plan is not None
    asked = plan.config.inference_model.gpu_memory_utilization
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(at_start(plan, 79.1), CacheConfig(gpu_memory_utilization=asked))
    assert plan.engine.gpu_memory_utilization < asked
    assert any("of the GPU and not inference_model.gpu_memory_utilization=0.9" in note for note in plan.notes)


def test_an_engine_that_takes_turns_has_no_larger_cache_than_it_uses() -> None:
    """Every GiB is given back and taken again at each turn: on an H200 0.02 s each time."""
    # Tokens, layers, keys and values, heads, their width, bytes of bfloat16.
    one = 1536 * 36 * 2 * 2 * 128 * 2

    def cache(gpus: int, card: float, *overrides: str) -> int | None:
        config = configured("model.name=Qwen/Qwen2.5-3B-Instruct", *overrides, name="grpo_gsm8k")
        machine = Machine(gpus, card, 1024.0, 4096.0, "0.32.0", gpu_ids=tuple(map(str, range(gpus))))
        return make_plan(config, False, machine).engine.kv_cache_bytes

    assert cache(1, 139.8) == 2 * 512 * one
    assert cache(1, 139.8, "inference_model.max_num_seqs=64") == 2 * 64 * one
    assert cache(1, 139.8, "inference_model.max_num_seqs=1") == GIB
    assert cache(1, 139.8, "inference_model.kv_cache_gib=3") == 3 * GIB
    assert cache(1, 79.1) is None, "vLLM measures what is left, which is not much more"
    assert cache(2, 139.8) is None, "it never sleeps"
    both = (
        "train_model.num_devices=2",
        "inference_model.num_devices=2",
        "inference_model.tensor_parallel_size=2",
    )
    assert cache(2, 139.8, *both) == 2 * 512 * one, "of both devices together"
