"""From the plan to engines and pushes, and the order of waking, pushing and sleeping where GPUs are shared.

There is no GPU here: learner, engine and weight check are stand-ins that note when they are called, and plans are made
for machines that have GPUs."""

import pytest
import torch

from config.schema.config import Config
from tests.rollout.conftest import lora_policy
from tests.scripts import configured
from tests.tiny import EOS, tiny_llama
from torchgrpo.cluster import runtime
from torchgrpo.cluster.runtime import Place
from torchgrpo.plan.devices import TRANSPORTS
from torchgrpo.plan.machine import Machine, installed_vllm
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.backends.vllm import vllm_settings
from torchgrpo.rollout.engines.build import adapter_shape, build_weights, engine_places
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.engines.vllm_settings import AdapterShape
from torchgrpo.rollout.weights.outgoing import NamedTensors, ReadyTensor
from torchgrpo.rollout.weights.push import Weights
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.adapters import linear_names
from torchgrpo.training.model_loading import load_model
from torchgrpo.training.published_weights import PolicyWeights, pushed_tensors

Calls = list[str]


def a_config() -> Config:
    """The config of a model whose sizes are not known here."""
    config = Config()
    config.model.name = "some/model"
    return config


def gpu_plan(config: Config, ids: tuple[str, ...], vllm: str | None = "0.32.0", nodes: int = 1) -> Plan:
    machine = Machine(len(ids), 80.0, 64.0, 1024.0, vllm, gpu_ids=ids, nodes=nodes)
    return make_plan(config, False, machine)


class Noting:
    """Learner, engine and weight check in one."""

    policy_version = 0
    members = (1,)
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

    def due(self, version: int) -> bool:
        return True

    def compare(self, version: int) -> dict[str, float]:
        self.calls.append("compare")
        return {"weight_check/mean": 0.0}

    def load(self, weights: NamedTensors, version: int) -> None:
        self.calls.append(f"push {version}: {', '.join(name for name, _ in weights)}")


def weights(noting: Noting, in_turns: bool) -> Weights:
    return Weights(noting, noting, noting, in_turns)


def test_engines_sleep_only_between_collecting_and_the_next_push() -> None:
    """Before they wake the learner gives back what its allocator keeps, which another process cannot have."""
    noting = Noting()
    pushed = weights(noting, in_turns=True)
    pushed.push()
    pushed.check_push()
    assert noting.calls == ["push 0: weight", "compare"]
    noting.calls.clear()
    pushed.rest_engines()
    pushed.rest_engines()
    assert pushed.check() == {}, "they sleep"
    pushed.push()
    assert noting.calls == ["sleep", "learner releases memory", "wake", "push 1: weight"]


def test_engines_with_gpus_of_their_own_never_sleep() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=False)
    pushed.push()
    pushed.rest_engines()
    pushed.push()
    assert not {"sleep", "wake"} & set(noting.calls)


# --- as the plan says -------------------------------------------------------------------------------------


def test_places_name_gpus_as_the_machine_does() -> None:
    plan = gpu_plan(a_config(), ("4", "GPU-77"))
    assert plan.devices.engines == ((1,),)
    assert engine_places(plan) == [Place("engine 0", ("GPU-77",))]


def test_on_a_cluster_places_ask_for_gpus_and_name_none() -> None:
    config = a_config()
    config.inference_model.num_devices, config.inference_model.tensor_parallel_size = 4, 2
    plan = gpu_plan(config, ("0", "1"), nodes=2)
    assert engine_places(plan) == [Place(f"engine {index}", num_gpus=2) for index in (0, 1)]
    assert str(engine_places(plan)[0]) == "engine 0 (2 GPUs of the cluster)"


def test_settings_of_an_engine_are_the_plans() -> None:
    plan = gpu_plan(a_config(), ("0", "1"))
    settings = vllm_settings(plan.config, (2,), plan)
    assert settings.dtype == plan.engine.dtype == "bfloat16"
    assert settings.max_num_batched_tokens == plan.engine.max_num_batched_tokens == 8192
    assert settings.async_scheduling and plan.engine.async_scheduling
    assert settings.weight_transfer == plan.transport == "nccl"


@pytest.mark.parametrize("change", ["adapter", "transformers", "no vLLM"])
def test_only_vllms_full_weights_travel_natively(change: str) -> None:
    """Adapters are files to vLLM, and transformers engines know neither its transfer nor sleep."""
    config = a_config()
    if change == "adapter":
        config.train_model.lora.enabled, config.inference_model.lora = True, "adapter"
    if change == "transformers":
        config.inference_model.backend = "transformers"
    for ids in (("0", "1"), ("0",)):
        config.ray.enabled = len(ids) == 1
        plan = gpu_plan(config, ids, vllm=None if change == "no vLLM" else "0.32.0")
        assert plan.transport == "shared_memory"
        transport = TRANSPORTS.load(plan.transport)(plan)
        assert transport.direct is None and isinstance(transport.copy, SharedMemory)
        built = build_weights(
            config, PolicyWeights(tiny_llama(), pushed_tensors(config, plan)), Noting(), plan
        )
        assert built.takes_turns == plan.engine.sleeps
        if plan.engine.backend == "transformers":
            assert not plan.engine.sleeps
        else:
            settings = vllm_settings(config, (2,), plan)
            assert settings.weight_transfer is None
            assert plan.engine.sleeps == settings.sleep == plan.devices.colocated


def test_an_engine_that_keeps_its_memory_says_so() -> None:
    with pytest.raises(RuntimeError, match="cannot give its memory back"):
        TransformersEngine(tiny_llama(), [EOS]).sleep()


def test_the_weight_check_is_the_plans() -> None:
    """An engine without a prefix cache is asked for less; the coarser arithmetic of both sides sets the bounds."""
    config, found = a_config(), {}
    for name, vllm, dtype, quantization in (
        ("vllm", "0.32.0", "auto", None),
        ("tf32", "0.32.0", "float32", None),
        ("fp8", "0.32.0", "auto", "fp8"),
        ("plain", None, "auto", None),
    ):
        config.inference_model.dtype, config.inference_model.quantization = dtype, quantization
        plan = gpu_plan(config, ("0", "1"), vllm)
        policy = PolicyWeights(tiny_llama(), pushed_tensors(config, plan))
        check = build_weights(config, policy, Noting(), plan).weight_check  # type: ignore[arg-type]
        found[name] = (check.plan.count, check.plan.length, check.plan.dtype)
        assert check.every == config.train.weight_check_every
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
    """And a replaced engine, on whichever node, the copy of the last push."""
    from torchgrpo.rollout.weights.from_ranks import TransferFromRanks
    from torchgrpo.rollout.weights.vllm_transfer import LOOPBACK, NativeTransfer

    monkeypatch.setattr(runtime, "own_address", lambda: "10.1.2.3")
    for cluster, address, copy in (
        (None, LOOPBACK, SharedMemory),
        ("10.1.2.3:6379", "10.1.2.3", ObjectStore),
    ):
        config = a_config()
        config.ray.address = cluster
        plan = gpu_plan(config, ("0", "1"))
        assert plan.transport == "nccl"
        transport = TRANSPORTS.load(plan.transport)(plan)
        assert isinstance(transport.direct, NativeTransfer) and isinstance(transport.copy, copy)
        assert transport.direct.address() == address
        config.train_model.num_devices = 2
        plan = gpu_plan(config, ("0", "1", "2"))
        transport = TRANSPORTS.load(plan.transport)(plan)
        assert isinstance(transport.direct, TransferFromRanks), "the same, in the first rank"
        assert isinstance(transport.direct.transfer, NativeTransfer)
        assert transport.direct.transfer.address() == address


def test_full_weights_leave_in_the_engines_dtype_and_adapters_as_they_are() -> None:
    config = a_config()
    plan = gpu_plan(config, ("0", "1"))
    full = PolicyWeights(lora_policy(), pushed_tensors(config, plan)).publish()
    config.inference_model.lora = "adapter"
    adapter = PolicyWeights(lora_policy(), pushed_tensors(config, plan)).publish()
    assert {tensor.dtype for tensor in full} == {torch.bfloat16}
    assert {tensor.dtype for tensor in adapter} == {torch.float32}
    assert len(adapter) == 8 < len(full)


def test_an_adapters_shape_is_read_from_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("train_model.lora.enabled=true", "inference_model.lora=adapter")
    expected = linear_names(load_model(config.model, torch.device("cpu")))
    monkeypatch.setattr(
        "transformers.PreTrainedModel.from_pretrained", lambda *_, **how: pytest.fail("weights")
    )
    lora = config.train_model.lora
    assert adapter_shape(config) == AdapterShape(lora.r, lora.alpha, expected)
    config.inference_model.lora = "merge"
    assert adapter_shape(config) is None
