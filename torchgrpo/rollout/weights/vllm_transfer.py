"""The learner's side of vLLM's native weight-transfer API: `nccl` across GPUs, `ipc` on one GPU.

    learner (rank 0)                         engine workers (ranks 1 ...)
    start ─────────────────────────────────▶ prepare a layer-wise reload
    update: names, dtypes, shapes ─────────▶ receive        both inside the same NCCL broadcast,
    broadcast of every tensor ═════════════▶ load           or CUDA IPC handles in the update itself
    finish(version) ───────────────────────▶ finish, drop the prefix cache, stamp the version

Tensors are packed into buffers on the learner's first GPU, one after the other; those that lie on another of its
GPUs are brought there first. The engines' side is `VLLMEngine.transfer`. Written from vLLM 0.32's source; on a CPU
the tests run everything here but the two data planes, which need CUDA.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from config.schema.errors import DeadlineError
from torchgrpo.rollout.weights.outgoing import Engines, Outgoing, nbytes

LOOPBACK = "127.0.0.1"
_LARGE_CARD, _BUFFER, _SMALL_BUFFER = 40 << 30, 1 << 30, 256 << 20  # bytes


@dataclass(frozen=True)
class Endpoint:
    """The learner's end of a transfer.

    num_workers: of all engines together. address: at which they reach the learner. buffer_bytes: of one packed
    buffer; the largest tensor must fit.
    """

    num_workers: int
    address: str
    buffer_bytes: int


def nccl_init(end: Endpoint) -> TrainerInitInfo:
    with socket.socket() as probe:
        probe.bind((end.address, 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        master_address=end.address,
        master_port=port,
        world_size=1 + end.num_workers,
        rank=0,
        packed_buffer_size_bytes=end.buffer_bytes,
    )


def ipc_init(end: Endpoint) -> TrainerInitInfo:
    """Packed: one by one, vLLM keeps every tensor that was cast or merged until all have arrived."""
    return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=end.buffer_bytes)


INIT: dict[str, Callable[[Endpoint], TrainerInitInfo]] = {"nccl": nccl_init, "ipc": ipc_init}


def buffer_bytes(weights: Outgoing) -> int:
    """Of one packed buffer: little where a GPU is small, and never less than the largest tensor."""
    device = weights.devices[0]
    card = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _LARGE_CARD
    usual = _BUFFER if card >= _LARGE_CARD else _SMALL_BUFFER
    return max(usual, *(nbytes(tensor) for tensor in weights.tensors))


class _Source(WeightSource):
    """The tensors of one push, on one device."""

    def __init__(self) -> None:
        self.weights = Outgoing([])

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(tensor.name, tensor.dtype, tensor.shape) for tensor in self.weights.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        device = self.weights.devices[0]
        for name, tensor in self.weights:
            yield name, tensor.to(device)


class _Client:
    """vLLM's control plane: each call goes to every engine at once."""

    engines: Engines

    def __init__(self, workers_per_engine: int) -> None:
        self.version = 0
        self._workers_per_engine = workers_per_engine

    def call_all(self, call: str, **arguments: Any) -> None:
        count = len(self.engines.members)
        self.engines.call_each("transfer", [{"call": call, **arguments}] * count)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine's workers take the ranks after those of the engines before it."""
        infos = []
        for index in range(len(self.engines.members)):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self._workers_per_engine
            infos.append({"call": "init_weight_transfer_engine", "init_info": info})
        self.engines.call_each("transfer", infos)

    def start_weight_update(self) -> None:
        self.call_all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call_all("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call_all("finish_weight_update", version=self.version)


@dataclass
class NativeTransfer:
    """A `DirectTransfer` over vLLM's API.

    backend: "nccl", or "ipc" for engines on the learner's own GPU but in other processes; the engines are started
        with `VLLMSettings.weight_transfer=backend`.
    workers_per_engine: `tensor_parallel_size`.
    address: at which the engines reach the learner; another than loopback where they are on other nodes.
    timeout: seconds that a push may take.
    """

    backend: str
    workers_per_engine: int = 1
    address: Callable[[], str] = lambda: LOOPBACK
    timeout: float = 600.0
    _members: tuple[int, ...] | None = None
    _trainer: Any = None

    def __post_init__(self) -> None:
        self._source = _Source()
        self._client = _Client(self.workers_per_engine)

    def push(self, weights: Outgoing, version: int, engines: Engines) -> None:
        """Raises DeadlineError when the engines do not take part; the process must then end."""
        for device in weights.devices:
            if device.type == "cuda":  # the sender reads on streams of its own, which wait for no optimizer
                torch.cuda.synchronize(device)
        self._source.weights = weights
        self._client.version, self._client.engines = version, engines
        try:
            self._send_in_time(engines)
        finally:
            self._source.weights = Outgoing([])

    def _connect(self) -> None:
        if self._trainer is not None:
            # The engines let go of what connected them to the learner, which vLLM would overwrite and keep.
            self._client.call_all("shutdown_weight_transfer_engine")
        self.close()
        members = self._client.engines.members
        end = Endpoint(
            len(members) * self.workers_per_engine, self.address(), buffer_bytes(self._source.weights)
        )
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            INIT[self.backend](end), client=self._client, source=self._source
        )
        self._members = members

    def _send_in_time(self, engines: Engines) -> None:
        """A collective that lost its peer never returns, so it runs in a thread that may be left behind."""
        outcome: list[BaseException | None] = []
        device = self._source.weights.devices[0]

        def run() -> None:
            try:
                if device.type == "cuda":  # a new thread would be on GPU 0
                    torch.cuda.set_device(device)
                if self._members != engines.members:  # at first, and after an engine was replaced
                    self._connect()
                self._trainer.send_weights()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run, name=f"{self.backend} push", daemon=True)
        thread.start()
        thread.join(self.timeout)
        if not outcome:
            raise DeadlineError(
                f"{engines.stacks()}\nthe learner waited {self.timeout:.0f} s for "
                f"{len(engines.members)} engines to take the {self.backend} push"
            )
        if outcome[0] is not None:
            raise outcome[0]

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
        self._trainer, self._members = None, None
