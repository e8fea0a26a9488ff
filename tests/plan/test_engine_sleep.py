"""Tests which models and cards keep an engine awake while the learner trains."""

import pytest

from tests.plan.test_plan import config_of, machine, text_of
from torchgrpo.plan.make_plan import AWAKE_CACHE_FACTORS, MAX_RESIDENT_SHARE, make_plan
from torchgrpo.plan.memory import CONTEXT_BYTES, kv_bytes_per_sequence, usable_bytes
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan, engine_bytes_without_cache, kv_cache_per_device, learner_peak_bytes
from torchgrpo.plan.problems import find_problems

CARDS = (23.6, 47.5, 79.1, 139.8)
SIZES = ("0.5B", "1.5B", "3B", "7B")


def plan_of(size: str, card: float | None, *overrides: str, gpus: int = 1) -> Plan:
    model = (f"model.name=Qwen/Qwen2.5-{size}-Instruct", "policy.kl_coef=0")
    config = config_of("grpo_gsm8k", *model, *overrides)
    return make_plan(config, False, machine(gpus, card, host_memory_gib=512.0))


def awake_sizes(card: float, *overrides: str) -> list[str]:
    return [size for size in SIZES if not plan_of(size, card, *overrides).engine.sleeps]


def test_sizes_whose_engine_stays_awake() -> None:
    full = "train.gradient_checkpointing=full"
    assert awake_sizes(139.8, full) == ["0.5B", "1.5B", "3B"]
    assert awake_sizes(79.1, full) == ["0.5B", "1.5B"]
    assert awake_sizes(23.6, full) == []
    assert awake_sizes(79.1, full, "inference_model.max_num_seqs=64") == ["0.5B", "1.5B", "3B"]
    assert awake_sizes(139.8, full, "inference_model.sleep=true") == []
    assert awake_sizes(139.8) == ["0.5B", "1.5B"], "activations of 3B that are kept leave less memory"


def test_an_engine_that_must_stay_awake_has_room_beside_activations() -> None:
    """The learner recomputes activations that would fit alone."""
    alone = plan_of("3B", 139.8, "inference_model.sleep=true")
    together = plan_of("3B", 139.8, "inference_model.sleep=false")
    assert alone.learner.recomputation == "selective" and together.learner.recomputation == "full"
    assert not together.engine.sleeps and not find_problems(together)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", [(), ("train_model.lora.enabled=true",), ("ray.enabled=true",)])
def test_an_awake_engine_leaves_the_learners_peak(size: str, card: float, way: tuple[str, ...]) -> None:
    plan = plan_of(size, card, *way)
    if plan.engine.sleeps:
        assert "the engine sleeps  [inference_model.sleep]" in text_of(plan)
        return
    assert plan.shape is not None and plan.devices.colocated
    cache, peak = kv_cache_per_device(plan, plan.shape), learner_peak_bytes(plan)
    assert cache is not None
    engine_bytes = engine_bytes_without_cache(plan, plan.shape) + cache
    assert peak + engine_bytes <= MAX_RESIDENT_SHARE * usable_bytes(card)
    share_bytes = plan.engine.gpu_memory_utilization * card * GIB
    assert engine_bytes <= share_bytes <= card * GIB - peak - CONTEXT_BYTES
    one = kv_bytes_per_sequence(plan.config, plan.shape, plan.engine.dtype)
    assert cache >= min(AWAKE_CACHE_FACTORS) * plan.engine.max_num_seqs * one - 1, "all running sequences fit"
    assert "the engine stays awake  [inference_model.sleep]" in text_of(plan)
    assert not find_problems(plan)


def test_the_process_of_an_engine_has_its_own_context() -> None:
    here, actor = plan_of("0.5B", 139.8), plan_of("0.5B", 139.8, "ray.enabled=true")
    assert learner_peak_bytes(actor) == learner_peak_bytes(here) + CONTEXT_BYTES


def test_an_engine_of_unknown_sizes_sleeps_unless_it_is_told_not_to() -> None:
    assert plan_of("0.5B", None).engine.sleeps
    assert not plan_of("0.5B", None, "inference_model.sleep=false").engine.sleeps
    assert not plan_of("0.5B", 139.8, gpus=2).engine.sleeps, "it has a GPU of its own"


def test_a_setting_that_does_not_fit_is_refused() -> None:
    assert plan_of("7B", 79.1).engine.sleeps
    plan = plan_of("7B", 79.1, "inference_model.sleep=false")
    (text,) = [problem.text for problem in find_problems(plan) if "inference_model.sleep=false" in problem.text]
    assert "a GPU has 79.10 GiB" in text and "leave inference_model.sleep unset" in text


def test_a_configured_cache_is_kept() -> None:
    plan = plan_of("1.5B", 79.1, "inference_model.kv_cache_gib=4")
    assert (plan.engine.sleeps, plan.engine.kv_cache_bytes) == (False, 4 * GIB)
