"""Tests of the learner's side of vLLM's weight transfer with fake GPUs.

The tests need no GPU. Tensors are torch's fake tensors, which are on cuda:N, compute shapes only, and raise where CUDA
would on mixed devices. Calls of torch.cuda and of vLLM's trainer are recorded.
"""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.training.published_weights import PolicyTensor

if installed_vllm() is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

from torchgrpo.rollout.weights.vllm_weight_transfer import (
    TransferEndpoint,
    VLLMWeightTransfer,
    _UpdateSource,
    buffer_bytes,
    ipc_init,
    nccl_init,
)

MIB = 1 << 20
PRETENDING = FakeTensorMode()


def tensors_on_two_gpus(dtype: torch.dtype = torch.float32) -> WeightUpdate:
    """Makes fake tensors on two GPUs, as a learner with spread layers has them."""
    with PRETENDING:
        tensors = {f"layer {gpu}": torch.ones(8, 4, device=f"cuda:{gpu}") for gpu in (0, 1)}
    return WeightUpdate([PolicyTensor(name, tensor, None, dtype) for name, tensor in tensors.items()])


def test_tensors_of_several_gpus_are_packed_on_the_first() -> None:
    source = _UpdateSource()
    source.weights = tensors_on_two_gpus(torch.bfloat16)
    with PRETENDING:
        packed = pack_tensors(iter(source), lambda pair: pair[1], MIB)
    assert packed is not None
    assert packed.packed_tensor.device == torch.device("cuda:0")
    assert packed.packed_tensor.numel() == 2 * 2 * 8 * 4
    assert [(one.name, one.dtype, one.shape) for one in source.metadata()] == list(
        zip(packed.names, packed.dtypes, [tuple(shape) for shape in packed.shapes], strict=True)
    )


class RecordingEngines:
    """Two fake engines that record their calls."""

    def __init__(self) -> None:
        self.engine_pids: tuple[int, ...] = (10, 11)
        self.calls: list[Any] = []

    def call_each(self, method: str, arguments: Any) -> list[Any]:
        assert len(arguments) == len(self.engine_pids)
        self.calls.append(arguments[0]["call"])
        return []

    def stacks(self) -> str:
        return ""


class FakeTrainer:
    """Fake of vLLM's trainer, which would open an NCCL communicator."""

    def __init__(self, client: Any, source: Any, calls: list[Any]) -> None:
        self.client, self.calls = client, calls
        client.init_weight_transfer_engine({"rank_offset": 1})

    def send_weights(self) -> None:
        self.calls.append("send")

    def shutdown(self) -> None:
        self.calls.append("trainer lets go")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> RecordingEngines:
    """Fake engines whose record also has the calls of torch.cuda."""
    engines = RecordingEngines()
    cuda = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: engines.calls.append(f"synchronize {device}"))

    def set_device(device: torch.device) -> None:
        assert threading.current_thread() is not threading.main_thread()
        engines.calls.append(f"thread on {device}")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(
        WeightTransferTrainerFactory,
        "trainer_init",
        lambda init, *, client, source: FakeTrainer(client, source, engines.calls),
    )
    return engines


def test_a_push_waits_for_the_learners_streams_on_every_gpu(engines: RecordingEngines) -> None:
    VLLMWeightTransfer("ipc").push(tensors_on_two_gpus(), 3, engines)
    assert engines.calls == [
        "synchronize cuda:0",
        "synchronize cuda:1",
        "thread on cuda:0",
        "init_weight_transfer_engine",
        "send",
    ]


def test_engines_close_the_old_connection_before_a_new_one(engines: RecordingEngines) -> None:
    """vLLM would overwrite the communicator, and its memory on every GPU would leak."""
    transfer = VLLMWeightTransfer("nccl")
    weights = WeightUpdate.from_pairs([("w", torch.ones(2))])
    transfer.push(weights, 1, engines)
    transfer.push(weights, 2, engines)
    engines.engine_pids = (10, 12)
    transfer.push(weights, 3, engines)
    assert engines.calls == [
        "init_weight_transfer_engine",
        "send",
        "send",
        "shutdown_weight_transfer_engine",
        "trainer lets go",
        "init_weight_transfer_engine",
        "send",
    ]


@pytest.mark.parametrize(("card_gib", "expected"), [(24, 256 * MIB), (80, 1024 * MIB)])
def test_buffers_are_small_where_a_card_is(
    engines: RecordingEngines, monkeypatch: pytest.MonkeyPatch, card_gib: int, expected: int
) -> None:
    card = SimpleNamespace(total_memory=card_gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert buffer_bytes(tensors_on_two_gpus()) == expected


def test_a_buffer_holds_the_largest_tensor(engines: RecordingEngines) -> None:
    """The embedding has 152,064 tokens; the ipc sender refuses tensors larger than a buffer."""
    with PRETENDING:
        embedding = torch.empty(152_064, 8192, device="cuda:0")
    weights = WeightUpdate([PolicyTensor("embedding", embedding, None, torch.bfloat16)])
    assert buffer_bytes(weights) == 2 * 152_064 * 8192


def test_engines_on_other_nodes_are_given_this_nodes_address() -> None:
    init = nccl_init(TransferEndpoint(num_workers=4, address="127.0.0.2", buffer_bytes=5 * MIB))
    assert (init.master_address, init.world_size, init.packed) == ("127.0.0.2", 5, True)  # type: ignore[attr-defined]
    assert init.packed_buffer_size_bytes == 5 * MIB  # type: ignore[attr-defined]


def test_an_ipc_push_is_packed() -> None:
    """Unpacked, vLLM would keep a second copy of the weights.

    It keeps every cast or merged tensor until the engine has read the last one.
    """
    init = ipc_init(TransferEndpoint(num_workers=1, address="127.0.0.1", buffer_bytes=5 * MIB))
    assert (init.packed, init.packed_buffer_size_bytes) == (True, 5 * MIB)  # type: ignore[attr-defined]
