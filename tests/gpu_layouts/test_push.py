"""Pushes of the learner's weights to engines, on simulated machines of 1 to 8 GPUs.

The learner is built and laid out by the plan, and the transports are the project's own. vLLM's trainers pack
and send; fakes replace the wire alone: NCCL's broadcast, and CUDA's handle of a buffer that another process
opens. See tests/pretend_gpu.py.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config.schema.policy import load_policy
from tests.gpu_layouts.layouts import LAYOUTS, LEARNER_LAYOUTS, Case, Layout, learner_on, save_tiny
from tests.pretend_gpu import SimulatedGPUs, pretend_gpus
from tests.rollout.conftest import score_single_engine
from tests.tiny_models import EOS, tiny_llama
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.training.published_weights import PolicyWeights, named_weights, push_tensor_source

needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
SEQUENCE = list(range(3, 30))
KIB = 1 << 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["full", "lora"])
def lora(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def policy_on(layout: Layout, tied: bool, lora: bool, folder: Path) -> tuple[nn.Module, Plan]:
    learner, plan = learner_on(layout, Case(load_policy("reinforce"), folder, tied, lora), folder)
    return learner.worker.model, plan


def make_update(model: nn.Module, plan: Plan) -> WeightUpdate:
    return WeightUpdate(PolicyWeights(model, push_tensor_source(plan.config, plan)).publish())


def expected_weights(tied: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the weights that must arrive; fresh adapters change nothing."""
    return {name: tensor.to(dtype) for name, tensor in tiny_llama(tied).state_dict().items()}


def equal_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[name].cpu(), tensor) and weights[name].dtype == tensor.dtype
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("layout", LEARNER_LAYOUTS)
def test_in_process(layout: str, tied: bool, lora: bool, folder: Path) -> None:
    """The engine scores as the learner does, which is what the weight check compares."""
    with pretend_gpus(LAYOUTS[layout].gpus):
        model, _ = policy_on(LAYOUTS[layout], tied, lora, folder)
        engine = TransformersEngine(tiny_llama(tied, seed=1).to("cuda:0"), [EOS])  # type: ignore[arg-type]
        learner = PolicyWeights(model, named_weights)
        engine.load(WeightUpdate(learner.publish()), 1)
        scores = learner.score([SEQUENCE])
        assert score_single_engine(engine, [SEQUENCE])[0] == pytest.approx(scores[0], abs=1e-5)


@pytest.mark.parametrize("way", ["shared memory", "object store"])
@pytest.mark.parametrize("layout", LEARNER_LAYOUTS)
def test_through_memory(
    layout: str, way: str, tied: bool, lora: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's store is replaced by the values themselves."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value: value)
    with pretend_gpus(LAYOUTS[layout].gpus):
        model, plan = policy_on(LAYOUTS[layout], tied, lora, folder)
        memory = SharedMemory() if way == "shared memory" else ObjectStore()
        arrived = dict(memory.write(make_update(model, plan)).open())
        assert all(tensor.device.type == "cpu" for tensor in arrived.values())
        memory.close()
    assert equal_weights(arrived, expected_weights(tied, torch.bfloat16))


class FakeEngines:
    """Fake engines that record calls and read the buffers of an ipc push.

    count: number of engines of the plan.
    """

    def __init__(self, count: int) -> None:
        self.engine_pids = tuple(range(count))
        self.update_infos: list[dict[str, Any]] = []
        self.read: Callable[[dict[str, Any]], None] = lambda update: None

    def call_each(self, method: str, arguments: Any) -> list[Any]:
        if arguments[0]["call"] == "update_weights":
            self.update_infos.append(arguments[0]["update_info"])
            self.read(arguments[0]["update_info"])
        return []

    def stacks(self) -> str:
        return ""


def unpack_buffer(buffer: Tensor, update: dict[str, Any]) -> dict[str, Tensor]:
    """Unpacks a packed buffer as vLLM's worker does."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    dtypes = [getattr(torch, name) for name in update["dtype_names"]]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in zip(dtypes, update["shapes"], strict=True)]
    pairs = unpack_tensor(buffer[: sum(sizes)], update["names"], update["shapes"], dtypes, sizes)
    return {name: tensor.clone() for name, tensor in pairs}


class FakeCommunicator:
    """Fake NCCL communicator of one GPU, which refuses tensors elsewhere (pynccl.py, `broadcast`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sent_tensors: list[Tensor] = []

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        assert tensor.device == self.device, f"this communicator works on {self.device}, not on {tensor.device}"
        self.sent_tensors.append(tensor.cpu())


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes a push use several packed buffers, and clears vLLM's cache of streams."""
    from vllm.distributed.weight_transfer import packed_tensor

    from torchgrpo.rollout.weights import vllm_weight_transfer

    monkeypatch.setattr(vllm_weight_transfer, "_BUFFER_BYTES", 100 * KIB)
    packed_tensor._get_streams.cache_clear()
    yield
    packed_tensor._get_streams.cache_clear()


SEPARATE_LAYOUTS = [name for name, layout in LAYOUTS.items() if layout.gpus > 1]


@needs_vllm
@pytest.mark.parametrize("layout", SEPARATE_LAYOUTS)
def test_nccl(
    layout: str, tied: bool, lora: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, small_buffers: None
) -> None:
    """The communicator's GPU has all buffers; the push waits for all learner GPUs."""
    from vllm.distributed.weight_transfer import nccl_engine

    from torchgrpo.rollout.weights.vllm_weight_transfer import VLLMWeightTransfer

    communicators: list[FakeCommunicator] = []

    def connect(init: Any) -> FakeCommunicator:
        communicators.append(FakeCommunicator(torch.device("cuda", torch.cuda.current_device())))
        return communicators[-1]

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", connect)
    with pretend_gpus(LAYOUTS[layout].gpus) as gpus:
        model, plan = policy_on(LAYOUTS[layout], tied, lora, folder)
        assert plan.transport == "nccl"
        engines = FakeEngines(len(plan.devices.engines))
        VLLMWeightTransfer("nccl", timeout=600).push(make_update(model, plan), 1, engines)
        assert synchronized_gpus(gpus) >= set(plan.devices.train)
    (communicator,), (update,) = communicators, engines.update_infos
    assert communicator.device == torch.device("cuda", plan.devices.train[0])
    assert len(communicator.sent_tensors) > 1
    assert equal_weights(
        unpack_buffer(torch.cat(communicator.sent_tensors), update), expected_weights(tied, torch.bfloat16)
    )


def synchronized_gpus(gpus: SimulatedGPUs) -> set[int]:
    return {device.index for device in gpus.synchronized_devices}


@needs_vllm
def test_vllm_packs_no_tensors_of_two_gpus() -> None:
    """The library's own limit, which the pushes above must avoid."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    with pretend_gpus(2):
        pairs = [(f"layer {gpu}", torch.ones(3, device=f"cuda:{gpu}")) for gpu in (0, 1)]
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
            pack_tensors(iter(pairs), lambda pair: pair[1], KIB)


@needs_vllm
@pytest.mark.parametrize("learner_gpu", [0, 1])
def test_ipc(
    learner_gpu: int, tied: bool, lora: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, small_buffers: None
) -> None:
    """The buffer is on the learner's GPU and carries the name of that GPU."""
    from vllm.distributed.weight_transfer import packed_tensor

    from torchgrpo.rollout.weights.vllm_weight_transfer import VLLMWeightTransfer

    buffers: list[Tensor] = []
    arrived: dict[str, Tensor] = {}

    def export(tensor: Tensor) -> tuple[None, tuple[str]]:
        buffers.append(tensor)
        return None, (str(tensor.device),)

    def read(update: dict[str, Any]) -> None:
        ((name, (device,)),) = update["ipc_handles"].items()
        assert (name, device) == (f"simulated-{learner_gpu}", f"cuda:{learner_gpu}")
        arrived.update(unpack_buffer(buffers[-1].cpu(), update))

    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    with pretend_gpus(2):
        layout = replace(LAYOUTS["1 GPU, in turns"], gpus=2, learner=(learner_gpu,), colocate=True)
        model, plan = policy_on(layout, tied, lora, folder)
        assert plan.devices.train == (learner_gpu,)
        engines = FakeEngines(1)
        engines.read = read
        VLLMWeightTransfer("ipc", timeout=600).push(make_update(model, plan), 1, engines)
    assert len(buffers) == 1
    assert len(engines.update_infos) > 1
    assert equal_weights(arrived, expected_weights(tied, torch.bfloat16))
    assert not [thread for thread in threading.enumerate() if thread.name == "ipc push"]
