"""The learner's weights by every way to the engines, on pretended machines of 1 to 8 GPUs (see tests/pretend_gpu.py).

The learner is built and spread as the plan says, and the ways are the project's own. vLLM's trainers pack and send;
a stand-in is the wire alone: NCCL's broadcast, and CUDA's handle of a buffer that another process opens.
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
from tests.gpu_layouts.layouts import LAYOUTS, PLACES, Case, Layout, learner_on, save_tiny
from tests.pretend_gpu import PretendedGPUs, pretend_gpus
from tests.rollout.conftest import scores_of_one
from tests.tiny import EOS, tiny_llama
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.published_weights import PolicyWeights, named_weights, pushed_tensors

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


def published(model: nn.Module, plan: Plan) -> Outgoing:
    return Outgoing(PolicyWeights(model, pushed_tensors(plan.config, plan)).publish())


def plain(tied: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """What must arrive: fresh adapters change nothing."""
    return {name: tensor.to(dtype) for name, tensor in tiny_llama(tied).state_dict().items()}


def same(arrived: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return arrived.keys() == expected.keys() and all(
        torch.equal(arrived[name].cpu(), tensor) and arrived[name].dtype == tensor.dtype
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("layout", PLACES)
def test_in_process(layout: str, tied: bool, lora: bool, folder: Path) -> None:
    """And the weight check's question: the engine scores as the learner does."""
    with pretend_gpus(LAYOUTS[layout].gpus):
        model, _ = policy_on(LAYOUTS[layout], tied, lora, folder)
        engine = TransformersEngine(tiny_llama(tied, seed=1).to("cuda:0"), [EOS])  # type: ignore[arg-type]
        learner = PolicyWeights(model, named_weights)
        engine.load(Outgoing(learner.publish()), 1)
        scores = learner.score([SEQUENCE])
        assert scores_of_one(engine, [SEQUENCE])[0] == pytest.approx(scores[0], abs=1e-5)


@pytest.mark.parametrize("way", ["shared memory", "object store"])
@pytest.mark.parametrize("layout", PLACES)
def test_through_memory(
    layout: str, way: str, tied: bool, lora: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's store keeps what it is given."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value: value)
    with pretend_gpus(LAYOUTS[layout].gpus):
        model, plan = policy_on(LAYOUTS[layout], tied, lora, folder)
        memory = SharedMemory() if way == "shared memory" else ObjectStore()
        arrived = dict(memory.write(published(model, plan)).open())
        assert all(tensor.device.type == "cpu" for tensor in arrived.values())
        memory.close()
    assert same(arrived, plain(tied, torch.bfloat16))


class Engines:
    """As many as the plan has; they note what the learner tells them and read what an ipc push hands them."""

    def __init__(self, count: int) -> None:
        self.members = tuple(range(count))
        self.declared: list[dict[str, Any]] = []
        self.read: Callable[[dict[str, Any]], None] = lambda update: None

    def call_each(self, method: str, arguments: Any) -> list[Any]:
        if arguments[0]["call"] == "update_weights":
            self.declared.append(arguments[0]["update_info"])
            self.read(arguments[0]["update_info"])
        return []

    def stacks(self) -> str:
        return ""


def unpacked(packed: Tensor, update: dict[str, Any]) -> dict[str, Tensor]:
    """As vLLM's worker takes a packed buffer apart."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    dtypes = [getattr(torch, name) for name in update["dtype_names"]]
    sizes = [
        dtype.itemsize * torch.Size(shape).numel()
        for dtype, shape in zip(dtypes, update["shapes"], strict=True)
    ]
    pairs = unpack_tensor(packed[: sum(sizes)], update["names"], update["shapes"], dtypes, sizes)
    return {name: tensor.clone() for name, tensor in pairs}


class Wire:
    """An NCCL communicator of one GPU: it sends what lies there and refuses the rest (pynccl.py, `broadcast`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sent: list[Tensor] = []

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        assert tensor.device == self.device, (
            f"this communicator works on {self.device}, not on {tensor.device}"
        )
        self.sent.append(tensor.cpu())


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several packed buffers a push; and no pretended stream is left in vLLM's cache of streams."""
    from vllm.distributed.weight_transfer import packed_tensor

    from torchgrpo.rollout.weights import vllm_transfer

    monkeypatch.setattr(vllm_transfer, "_BUFFER", 100 * KIB)
    packed_tensor._get_streams.cache_clear()
    yield
    packed_tensor._get_streams.cache_clear()


BESIDE = [name for name, layout in LAYOUTS.items() if layout.gpus > 1]


@needs_vllm
@pytest.mark.parametrize("layout", BESIDE)
def test_nccl(
    layout: str,
    tied: bool,
    lora: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_buffers: None,
) -> None:
    """All buffers lie on the learner's first GPU, where its communicator is, and every GPU of it is waited for."""
    from vllm.distributed.weight_transfer import nccl_engine

    from torchgrpo.rollout.weights.vllm_transfer import NativeTransfer

    wires: list[Wire] = []

    def connect(init: Any) -> Wire:
        wires.append(Wire(torch.device("cuda", torch.cuda.current_device())))
        return wires[-1]

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", connect)
    with pretend_gpus(LAYOUTS[layout].gpus) as gpus:
        model, plan = policy_on(LAYOUTS[layout], tied, lora, folder)
        assert plan.transport == "nccl"
        engines = Engines(len(plan.devices.engines))
        NativeTransfer("nccl", timeout=600).push(published(model, plan), 1, engines)
        assert waited_for(gpus) >= set(plan.devices.train)
    (wire,), (update,) = wires, engines.declared
    assert wire.device == torch.device("cuda", plan.devices.train[0])
    assert len(wire.sent) > 1
    assert same(unpacked(torch.cat(wire.sent), update), plain(tied, torch.bfloat16))


def waited_for(gpus: PretendedGPUs) -> set[int]:
    return {device.index for device in gpus.synchronized}


@needs_vllm
def test_vllm_packs_no_tensors_of_two_gpus() -> None:
    """What the pushes above are spared."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    with pretend_gpus(2):
        pairs = [(f"layer {gpu}", torch.ones(3, device=f"cuda:{gpu}")) for gpu in (0, 1)]
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
            pack_tensors(iter(pairs), lambda pair: pair[1], KIB)


@needs_vllm
@pytest.mark.parametrize("own", [0, 1])
def test_ipc(
    own: int,
    tied: bool,
    lora: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_buffers: None,
) -> None:
    """The buffer lies on the learner's GPU, be it the second, and is handed over under that one's name."""
    from vllm.distributed.weight_transfer import packed_tensor

    from torchgrpo.rollout.weights.vllm_transfer import NativeTransfer

    buffers: list[Tensor] = []
    arrived: dict[str, Tensor] = {}

    def export(tensor: Tensor) -> tuple[None, tuple[str]]:
        buffers.append(tensor)
        return None, (str(tensor.device),)

    def read(update: dict[str, Any]) -> None:
        ((name, (device,)),) = update["ipc_handles"].items()
        assert (name, device) == (f"pretended-{own}", f"cuda:{own}")
        arrived.update(unpacked(buffers[-1].cpu(), update))

    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    with pretend_gpus(2):
        layout = replace(LAYOUTS["1 GPU, in turns"], gpus=2, learner=(own,), colocate=True)
        model, plan = policy_on(layout, tied, lora, folder)
        assert plan.devices.train == (own,)
        engines = Engines(1)
        engines.read = read
        NativeTransfer("ipc", timeout=600).push(published(model, plan), 1, engines)
    assert len(buffers) == 1
    assert len(engines.declared) > 1
    assert same(arrived, plain(tied, torch.bfloat16))
    assert not [thread for thread in threading.enumerate() if thread.name == "ipc push"]
