"""Tests engines and weight pushes that a plan describes, and the sleep of engines.

Where GPUs are shared, the order of waking, pushing and sleeping is tested. No GPU is needed: learner, engine and weight
check are fakes that record calls, and plans are made for machines that have GPUs.
"""

from dataclasses import replace

import pytest
import torch

from config.schema.config import Config
from tests.rollout.conftest import lora_policy
from tests.script_runner import compose_run_config
from tests.tiny_models import EOS, tiny_llama
from torchgrpo.cluster import runtime
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.plan.devices import TRANSPORTS
from torchgrpo.plan.machine import Machine, installed_vllm
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.backends.vllm import make_vllm_settings
from torchgrpo.rollout.engines.build_engines import adapter_shape, build_weight_pusher, engine_device_slots
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.engines.vllm_settings import AdapterShape
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_pusher import WeightPusher
from torchgrpo.rollout.weights.weight_update import NamedTensors, ReadyTensor
from torchgrpo.training.adapters import linear_layer_names
from torchgrpo.training.model_loading import load_model
from torchgrpo.training.published_weights import PolicyWeights, push_tensor_source

Calls = list[str]


def unknown_model_config() -> Config:
    """Returns the config of a model whose shape is unknown."""
    config = Config()
    config.model.name = "some/model"
    return config


def gpu_plan(config: Config, ids: tuple[str, ...], vllm: str | None = "0.32.0", nodes: int = 1) -> Plan:
    machine = Machine(len(ids), 80.0, 64.0, 1024.0, vllm, gpu_ids=ids, nodes=nodes)
    return make_plan(config, False, machine)


class CallRecorder:
    """Fake learner, engine and weight check that records the calls."""

    policy_version = 0
    engine_pids = (1,)
    ranks = None
    optimizer_steps = 0
    version: int | None = None

    def __init__(self) -> None:
        self.calls: Calls = []

    def publish(self) -> list[ReadyTensor]:
        return [ReadyTensor("weight", torch.ones(1))]

    def release_memory(self) -> None:
        self.calls.append("learner releases memory")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def is_due(self, version: int) -> bool:
        return True

    def compare(self, version: int) -> dict[str, float]:
        self.calls.append("compare")
        return {"weight_check/mean": 0.0}

    def load(self, weights: NamedTensors, version: int) -> None:
        self.calls.append(f"push {version}: {', '.join(name for name, _ in weights)}")


def make_pusher(recorder: CallRecorder, in_turns: bool) -> WeightPusher:
    return WeightPusher(recorder, recorder, recorder, in_turns)


def test_engines_sleep_only_between_collecting_and_the_next_push() -> None:
    """The learner releases the memory that its allocator caches before engines wake."""
    recorder = CallRecorder()
    pusher = make_pusher(recorder, in_turns=True)
    pusher.push()
    pusher.check_push()
    assert recorder.calls == ["push 0: weight", "compare"]
    recorder.calls.clear()
    pusher.sleep_engines()
    pusher.sleep_engines()
    assert pusher.check() == {}, "they sleep"
    pusher.push()
    assert recorder.calls == ["sleep", "learner releases memory", "wake", "push 1: weight"]


def test_engines_with_gpus_of_their_own_never_sleep() -> None:
    recorder = CallRecorder()
    pusher = make_pusher(recorder, in_turns=False)
    pusher.push()
    pusher.sleep_engines()
    pusher.push()
    assert not {"sleep", "wake"} & set(recorder.calls)


def test_an_engine_that_stays_awake_on_the_learners_gpu_is_only_pushed_to() -> None:
    """Releases no memory between rollouts and training, where both fit on the GPU."""
    plan = gpu_plan(unknown_model_config(), ("0",))
    assert plan.devices.colocated and plan.engine.sleeps
    plan = replace(plan, engine=replace(plan.engine, sleeps=False))
    assert not make_vllm_settings(plan.config, (2,), plan).sleep
    recorder = CallRecorder()
    pusher = build_weight_pusher(plan.config, recorder, recorder, plan)  # type: ignore[arg-type]
    for _ in range(3):
        pusher.push()
        pusher.sleep_engines()
    assert recorder.calls == ["push 0: weight", "push 1: weight", "push 2: weight"]


# --- settings of a plan -------------------------------------------------------------------------------------


def test_places_name_gpus_as_the_machine_does() -> None:
    plan = gpu_plan(unknown_model_config(), ("4", "GPU-77"))
    assert plan.devices.engines == ((1,),)
    assert engine_device_slots(plan) == [DeviceSlot("engine 0", ("GPU-77",))]


def test_on_a_cluster_places_ask_for_gpus_and_name_none() -> None:
    config = unknown_model_config()
    config.inference_model.num_devices, config.inference_model.tensor_parallel_size = 4, 2
    plan = gpu_plan(config, ("0", "1"), nodes=2)
    assert engine_device_slots(plan) == [DeviceSlot(f"engine {index}", num_gpus=2) for index in (0, 1)]
    assert str(engine_device_slots(plan)[0]) == "engine 0 (2 GPUs of the cluster)"


def test_settings_of_an_engine_are_the_plans() -> None:
    plan = gpu_plan(unknown_model_config(), ("0", "1"))
    settings = make_vllm_settings(plan.config, (2,), plan)
    assert settings.dtype == plan.engine.dtype == "bfloat16"
    assert settings.max_num_batched_tokens == plan.engine.max_num_batched_tokens == 8192
    assert settings.async_scheduling and plan.engine.async_scheduling
    assert settings.weight_transfer == plan.transport == "nccl"


@pytest.mark.parametrize("change", ["adapter", "transformers", "no vLLM"])
def test_only_vllms_full_weights_travel_natively(change: str) -> None:
    """Only full weights of vLLM use its native transfer.

    vLLM loads adapters from files, and transformers engines support neither transfer nor sleep.
    """
    config = unknown_model_config()
    if change == "adapter":
        config.train_model.lora.enabled, config.inference_model.lora = True, "adapter"
    if change == "transformers":
        config.inference_model.backend = "transformers"
    for ids in (("0", "1"), ("0",)):
        config.ray.enabled = len(ids) == 1
        plan = gpu_plan(config, ids, vllm=None if change == "no vLLM" else "0.32.0")
        assert plan.transport == "shared_memory"
        transport = TRANSPORTS.load(plan.transport)(plan)
        assert transport.direct is None and isinstance(transport.host_copy, SharedMemory)
        built = build_weight_pusher(
            config, PolicyWeights(tiny_llama(), push_tensor_source(config, plan)), CallRecorder(), plan
        )
        assert built.is_time_shared == plan.engine.sleeps
        if plan.engine.backend == "transformers":
            assert not plan.engine.sleeps
        else:
            settings = make_vllm_settings(config, (2,), plan)
            assert settings.weight_transfer is None
            assert plan.engine.sleeps == settings.sleep == plan.devices.colocated


def test_an_engine_that_keeps_its_memory_says_so() -> None:
    with pytest.raises(RuntimeError, match="cannot release its memory"):
        TransformersEngine(tiny_llama(), [EOS]).sleep()


def test_the_weight_check_is_the_plans() -> None:
    """An engine without a prefix cache scores less; the coarser arithmetic sets the bounds."""
    config, found = unknown_model_config(), {}
    for name, vllm, dtype, quantization in (
        ("vllm", "0.32.0", "auto", None),
        ("tf32", "0.32.0", "float32", None),
        ("fp8", "0.32.0", "auto", "fp8"),
        ("plain", None, "auto", None),
    ):
        config.inference_model.dtype, config.inference_model.quantization = dtype, quantization
        plan = gpu_plan(config, ("0", "1"), vllm)
        policy = PolicyWeights(tiny_llama(), push_tensor_source(config, plan))
        check = build_weight_pusher(config, policy, CallRecorder(), plan).weight_check  # type: ignore[arg-type]
        found[name] = (check.plan.count, check.plan.length, check.plan.dtype)
        assert check.check_interval == config.train.weight_check_every
    assert found == {
        "vllm": (3, 160, "bfloat16"),
        "tf32": (3, 160, "tf32"),
        "fp8": (3, 160, "fp8"),
        "plain": (1, 24, "float32"),
    }
    config.inference_model.backend = "transformers"
    assert gpu_plan(config, ("0", "1")).engine.arithmetic == "float32"


@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
def test_engines_on_a_cluster_reach_the_learner_at_its_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a cluster connect to the learner's node.

    A replaced engine reads a copy of the last push on any node.
    """
    from torchgrpo.rollout.weights.sharded_weight_transfer import ShardedWeightTransfer
    from torchgrpo.rollout.weights.vllm_weight_transfer import LOOPBACK, VLLMWeightTransfer

    monkeypatch.setattr(runtime, "node_address", lambda: "10.1.2.3")
    for cluster, address, copy in ((None, LOOPBACK, SharedMemory), ("10.1.2.3:6379", "10.1.2.3", ObjectStore)):
        config = unknown_model_config()
        config.ray.address = cluster
        plan = gpu_plan(config, ("0", "1"))
        assert plan.transport == "nccl"
        transport = TRANSPORTS.load(plan.transport)(plan)
        assert isinstance(transport.direct, VLLMWeightTransfer) and isinstance(transport.host_copy, copy)
        assert transport.direct.address() == address
        config.train_model.num_devices = 2
        plan = gpu_plan(config, ("0", "1", "2"))
        transport = TRANSPORTS.load(plan.transport)(plan)
        assert isinstance(transport.direct, ShardedWeightTransfer), "the same, in the first rank"
        assert isinstance(transport.direct.transfer, VLLMWeightTransfer)
        assert transport.direct.transfer.address() == address


def test_full_weights_leave_in_the_engines_dtype_and_adapters_as_they_are() -> None:
    config = unknown_model_config()
    plan = gpu_plan(config, ("0", "1"))
    full = PolicyWeights(lora_policy(), push_tensor_source(config, plan)).publish()
    config.inference_model.lora = "adapter"
    adapter = PolicyWeights(lora_policy(), push_tensor_source(config, plan)).publish()
    assert {tensor.dtype for tensor in full} == {torch.bfloat16}
    assert {tensor.dtype for tensor in adapter} == {torch.float32}
    assert len(adapter) == 8 < len(full)


def test_an_adapters_shape_is_read_from_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_run_config("train_model.lora.enabled=true", "inference_model.lora=adapter")
    expected = linear_layer_names(load_model(config.model, torch.device("cpu")))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_, **options: pytest.fail("weights"))
    lora = config.train_model.lora
    assert adapter_shape(config) == AdapterShape(lora.r, lora.alpha, expected)
    config.inference_model.lora = "merge"
    assert adapter_shape(config) is None
