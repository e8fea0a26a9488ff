"""Learner's side of vLLM's weight-transfer API, which sends pushes by `nccl` or `ipc`.

    learner (rank 0)                         engine workers (ranks 1 ...)
    start ─────────────────────────────────▶ prepare a layer-wise reload
    update: names, dtypes, shapes ─────────▶ receive        both inside the same NCCL broadcast,
    broadcast of every tensor ═════════════▶ load           or CUDA IPC handles in the update itself
    finish(version) ───────────────────────▶ finish, drop the prefix cache, stamp the version

`nccl` transfers across GPUs, `ipc` inside one GPU. Tensors are packed into buffers on the learner's first GPU, one
after the other; tensors on its other GPUs are copied there first. The engines' side is `VLLMEngine.transfer`. The
source of the protocol is vLLM 0.32. Tests on a CPU run everything here except the two data planes, which need CUDA.
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
from torchgrpo.rollout.weights.weight_update import LiveEngines, WeightUpdate, nbytes

LOOPBACK = "127.0.0.1"
_LARGE_GPU_BYTES, _BUFFER_BYTES, _SMALL_BUFFER_BYTES = 40 << 30, 1 << 30, 256 << 20  # bytes


@dataclass(frozen=True)
class TransferEndpoint:
    """Learner's endpoint of a transfer.

    num_workers: of all engines together. address: at which the workers reach the learner.
    buffer_bytes: size of a packed buffer; the largest tensor must fit.
    """

    num_workers: int
    address: str
    buffer_bytes: int


def nccl_init(endpoint: TransferEndpoint) -> TrainerInitInfo:
    with socket.socket() as probe:
        probe.bind((endpoint.address, 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        master_address=endpoint.address,
        master_port=port,
        world_size=1 + endpoint.num_workers,
        rank=0,
        packed_buffer_size_bytes=endpoint.buffer_bytes,
    )


def ipc_init(endpoint: TransferEndpoint) -> TrainerInitInfo:
    """Returns the `ipc` settings of the learner.

    Buffers are packed, since vLLM would keep every cast or merged tensor until all unpacked tensors have arrived.
    """
    return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=endpoint.buffer_bytes)


TRAINER_INIT: dict[str, Callable[[TransferEndpoint], TrainerInitInfo]] = {"nccl": nccl_init, "ipc": ipc_init}


def buffer_bytes(weights: WeightUpdate) -> int:
    """Returns the size of a packed buffer, which holds at least the largest tensor."""
    device = weights.devices[0]
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _LARGE_GPU_BYTES
    default = _BUFFER_BYTES if gpu_bytes >= _LARGE_GPU_BYTES else _SMALL_BUFFER_BYTES
    return max(default, *(nbytes(tensor) for tensor in weights.tensors))


class _UpdateSource(WeightSource):
    """Source of a push's tensors for vLLM, on one device."""

    def __init__(self) -> None:
        self.weights = WeightUpdate([])

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(tensor.name, tensor.dtype, tensor.shape) for tensor in self.weights.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        device = self.weights.devices[0]
        for name, tensor in self.weights:
            yield name, tensor.to(device)


class _EngineClient:
    """Control plane of vLLM's transfer: sends each call to all engines concurrently."""

    engines: LiveEngines

    def __init__(self, workers_per_engine: int) -> None:
        self.version = 0
        self._workers_per_engine = workers_per_engine

    def call_all(self, call: str, **arguments: Any) -> None:
        count = len(self.engines.engine_pids)
        self.engines.call_each("transfer", [{"call": call, **arguments}] * count)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects the engines, whose workers have consecutive ranks."""
        infos = []
        for index in range(len(self.engines.engine_pids)):
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
class VLLMWeightTransfer:
    """`DirectTransfer` over vLLM's weight-transfer API.

    backend: "nccl", or "ipc" for engines in other processes on the learner's GPU. The engines must be started with
        `VLLMSettings.weight_transfer=backend`.
    workers_per_engine: `tensor_parallel_size`.
    address: returns the address at which engines reach the learner; not loopback if they are on other nodes.
    timeout: seconds that a push may take.
    """

    backend: str
    workers_per_engine: int = 1
    address: Callable[[], str] = lambda: LOOPBACK
    timeout: float = 600.0
    _connected_pids: tuple[int, ...] | None = None
    _trainer: Any = None

    def __post_init__(self) -> None:
        self._source = _UpdateSource()
        self._client = _EngineClient(self.workers_per_engine)

    def push(self, weights: WeightUpdate, version: int, engines: LiveEngines) -> None:
        """Pushes weights to all engines.

        Raises DeadlineError if the engines do not take part in time; the process must then end.
        """
        for device in weights.devices:
            if device.type == "cuda":  # vLLM sends on its own streams, which do not wait for the optimizer
                torch.cuda.synchronize(device)
        self._source.weights = weights
        self._client.version, self._client.engines = version, engines
        try:
            self._send_in_time(engines)
        finally:
            self._source.weights = WeightUpdate([])

    def _connect(self) -> None:
        if self._trainer is not None:
            # The engines close their old connection first: vLLM would overwrite it without closing it.
            self._client.call_all("shutdown_weight_transfer_engine")
        self.close()
        engine_pids = self._client.engines.engine_pids
        endpoint = TransferEndpoint(
            len(engine_pids) * self.workers_per_engine, self.address(), buffer_bytes(self._source.weights)
        )
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            TRAINER_INIT[self.backend](endpoint), client=self._client, source=self._source
        )
        self._connected_pids = engine_pids

    def _send_in_time(self, engines: LiveEngines) -> None:
        """Sends the update in a thread, which is abandoned if it exceeds the timeout.

        A collective whose peer is lost never returns.
        """
        outcome: list[BaseException | None] = []
        device = self._source.weights.devices[0]

        def run() -> None:
            try:
                if device.type == "cuda":  # a new thread uses GPU 0 by default
                    torch.cuda.set_device(device)
                if self._connected_pids != engines.engine_pids:  # at the first push, and after an engine was replaced
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
                f"{engines.stacks()}\nthe learner waited {self.timeout:.0f} s (inference_model.request_timeout_s) for "
                f"{len(engines.engine_pids)} engines to receive the {self.backend} push"
            )
        if outcome[0] is not None:
            raise outcome[0]

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
        self._trainer, self._connected_pids = None, None
