"""From the plan to engines and pushes, and the order of waking, pushing and sleeping where GPUs are shared.

There is no GPU here: engine, canary and transport are stand-ins that note when they are called, and plans are made
for machines that have GPUs."""

from typing import Any

import pytest
import torch

import run.engines
from config.schema import Config
from plan.machine import Machine, installed_vllm
from plan.plan import Plan, make_plan
from rollout.engines.pool import RayPool
from rollout.engines.ray_runtime import EnginePlace
from rollout.weights.canary import FLOOR, Tolerance, canary_sequences
from rollout.weights.outgoing import Outgoing
from rollout.weights.transports import InProcess
from run.engines import (
    Weights,
    build_weights,
    engine_places,
    measure_tolerance,
    outgoing,
    vllm_settings,
)
from tests.rollout.conftest import lora_policy
from tests.tiny import VOCABULARY, tiny_llama

Calls = list[str]


def a_config() -> Config:
    """Of a model whose sizes are not known here."""
    config = Config()
    config.model.name = "some/model"
    return config


def gpu_plan(config: Config, ids: tuple[str, ...], vllm: str | None = "0.32.0", nodes: int = 1) -> Plan:
    machine = Machine(len(ids), 80.0, 64.0, 1024.0, vllm, gpu_ids=ids, nodes=nodes)
    return make_plan(config, False, machine)


class Noting:
    """Engine, canary and transport in one."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def before_push(self) -> None:
        self.calls.append("score before")

    def after_push(self, version: int, received: frozenset[str]) -> dict[str, float]:
        self.calls.append("score after")
        return {"canary/max_abs_diff": 0.0}

    def push(self, weights: Outgoing, version: int) -> None:
        self.calls.append(f"push {version}: {', '.join(name for name, _ in weights)}")


def weights(noting: Any, in_turns: bool) -> Weights:
    return Weights(
        torch.nn.Linear(1, 1, bias=False),
        noting,
        noting,
        noting,
        named=lambda model: Outgoing.of(model.state_dict().items()),
        sleeper=noting if in_turns else None,
    )


def test_engines_sleep_only_between_collecting_and_the_next_push() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=True)
    pushed.push()
    assert noting.calls == ["score before", "push 0: weight", "score after"]
    noting.calls.clear()
    pushed.rest_engines()
    pushed.rest_engines()
    pushed.push()
    assert noting.calls == ["sleep", "wake", "score before", "push 1: weight", "score after"]


def test_engines_with_gpus_of_their_own_never_sleep() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=False)
    pushed.push()
    pushed.rest_engines()
    pushed.push()
    assert not {"sleep", "wake"} & set(noting.calls)


def test_an_engine_replaced_in_a_push_gets_no_push_inside_it() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=False)
    under_way: list[bool] = []
    push = noting.push

    def note(weights: Outgoing, version: int) -> None:
        under_way.append(pushed.pushing)
        push(weights, version)

    noting.push = note  # type: ignore[method-assign]
    pushed.push()
    pushed.push_again()
    assert under_way == [True, True]
    assert not pushed.pushing


def test_a_replaced_engine_gets_the_present_version_again() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=False)
    pushed.push()
    noting.calls.clear()
    pushed.push_again()
    assert noting.calls == ["push 0: weight"]
    assert pushed.version == 0


def test_the_learners_spare_gpu_memory_is_given_back_before_engines_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine in another process cannot have what the learner's allocator keeps."""
    noting = Noting()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: noting.calls.append("empty the cache"))
    pushed = weights(noting, in_turns=True)
    pushed.push()
    assert "empty the cache" not in noting.calls
    pushed.rest_engines()
    pushed.push()
    assert noting.calls[3:6] == ["sleep", "empty the cache", "wake"]


# --- as the plan says -------------------------------------------------------------------------------------


def test_places_name_gpus_as_the_machine_does() -> None:
    plan = gpu_plan(a_config(), ("4", "GPU-77"))
    assert plan.devices.engines == ((1,),)
    assert engine_places(plan) == [EnginePlace("engine 0", ("GPU-77",))]


def test_on_a_cluster_places_ask_for_gpus_and_name_none() -> None:
    config = a_config()
    config.inference_model.num_devices, config.inference_model.tensor_parallel_size = 4, 2
    plan = gpu_plan(config, ("0", "1"), nodes=2)
    assert engine_places(plan) == [EnginePlace(f"engine {index}", num_gpus=2) for index in (0, 1)]
    assert str(engine_places(plan)[0]) == "engine 0 (2 GPUs of the cluster)"


def test_settings_of_an_engine_are_the_plans() -> None:
    plan = gpu_plan(a_config(), ("0", "1"))
    settings = vllm_settings(plan.config, (2,), plan)
    assert settings.dtype == plan.engine.dtype == "bfloat16"
    assert settings.max_num_batched_tokens == plan.engine.max_num_batched_tokens == 8192
    assert settings.async_scheduling and plan.engine.async_scheduling
    assert settings.weight_transfer == plan.transport == "nccl"


class Pool(RayPool):
    """A pool without actors."""

    def __init__(self) -> None:
        self.transport = InProcess(self)
        self.request_push = None

    def sleep(self) -> None:
        raise AssertionError("this engine cannot")


@pytest.mark.parametrize("change", ["adapter", "transformers", "no vLLM"])
def test_only_vllms_full_weights_travel_natively(change: str) -> None:
    """Adapters are files to vLLM, and transformers engines know neither its transfer nor sleep."""
    config = a_config()
    if change == "adapter":
        config.train_model.lora.enabled, config.inference_model.lora = True, "adapter"
    if change == "transformers":
        config.inference_model.backend = "transformers"
    pool = Pool()
    for ids in (("0", "1"), ("0",)):
        config.ray.enabled = len(ids) == 1
        plan = gpu_plan(config, ids, vllm=None if change == "no vLLM" else "0.32.0")
        built = build_weights(config, tiny_llama(), pool, plan)
        assert built.transport is pool.transport
        assert plan.transport == "shared_memory"
        if plan.engine.backend == "transformers":
            assert built.sleeper is None
        else:
            assert vllm_settings(config, (2,), plan).weight_transfer is None
            assert (built.sleeper is pool) == plan.devices.colocated


@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
def test_engines_on_a_cluster_reach_the_learner_at_its_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.weights import transfer as vllm_transfer

    seen: list[str] = []
    monkeypatch.setattr(
        vllm_transfer, "NativeTransfer", lambda backend, pool, split, address, timeout: seen.append(address)
    )
    monkeypatch.setattr(run.engines, "own_address", lambda: "10.1.2.3")
    for cluster in (None, "10.1.2.3:6379"):
        config = a_config()
        config.ray.address = cluster
        plan = gpu_plan(config, ("0", "1"))
        assert plan.transport == "nccl"
        build_weights(config, tiny_llama(), Pool(), plan)
    assert seen == [vllm_transfer.LOOPBACK, "10.1.2.3"]


def test_the_tolerance_is_measured_unless_it_is_given() -> None:
    config = a_config()
    plan, model = gpu_plan(config, ("0", "1")), tiny_llama()
    sequences = canary_sequences(VOCABULARY, 160)
    half = measure_tolerance(config, model, plan, sequences)
    config.inference_model.quantization = "fp8"
    float8 = measure_tolerance(config, model, plan, sequences)
    assert FLOOR["bfloat16"] < half.largest < float8.largest
    assert float8.mean > 4 * half.mean
    config.inference_model.canary_tolerance = 0.6
    assert measure_tolerance(config, model, plan, sequences) == Tolerance(0.6, pytest.approx(0.1))


def test_full_weights_leave_in_the_engines_dtype_and_adapters_as_they_are() -> None:
    plan = gpu_plan(a_config(), ("0", "1"))
    full, adapter = outgoing(plan, merged=True), outgoing(plan, merged=False)
    assert {part.dtype for part in full(lora_policy()).parts} == {torch.bfloat16}
    assert {part.dtype for part in adapter(lora_policy()).parts} == {torch.float32}
