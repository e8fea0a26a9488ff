"""The learner's side of vLLM's native weight-transfer API: `nccl` across GPUs, `ipc` on one GPU.

    learner (rank 0)                         engine workers (ranks 1 ...)
    start ─────────────────────────────────▶ prepare a layer-wise reload
    update: names, dtypes, shapes ─────────▶ receive        both inside the same NCCL broadcast,
    broadcast of every tensor ═════════════▶ load           or CUDA IPC handles in the update itself
    finish(version) ───────────────────────▶ finish, drop the prefix cache, stamp the version

The engines' side is `VLLMEngine.transfer`. Written from vLLM 0.32's source; on a CPU the tests run everything
here but the two data planes, which need CUDA.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rollout.vllm_engine import VLLMEngine

LOOPBACK = "127.0.0.1"


class Targets(Protocol):
    """The engines that a push reaches: `RayPool`, or `OneEngine`."""

    @property
    def members(self) -> tuple[int, ...]:
        """Changes whenever an engine is replaced."""
        ...

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """The method of every engine at once, each with its own arguments."""
        ...

    def note_push(self, version: int, received: frozenset[str]) -> None: ...

    def stacks(self) -> str: ...


class OneEngine:
    """An engine in this process as the target of a native push."""

    members = (0,)

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        (mine,) = arguments
        return [getattr(self._engine, method)(**mine)]

    def note_push(self, version: int, received: frozenset[str]) -> None:
        pass

    def stacks(self) -> str:
        return ""


def nccl_init(num_workers: int) -> TrainerInitInfo:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(master_address=LOOPBACK, master_port=port, world_size=1 + num_workers, rank=0)


def ipc_init(num_workers: int) -> TrainerInitInfo:
    return IPCTrainerInitInfo(rank=0)


INIT: dict[str, Callable[[int], TrainerInitInfo]] = {"nccl": nccl_init, "ipc": ipc_init}


class _Source(WeightSource):
    """The tensors of one push, cast to the engines' dtype one at a time as they leave."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.weights: list[tuple[str, torch.Tensor]] = []
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, self._dtype or tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.weights:
            yield name, tensor if self._dtype is None else tensor.to(self._dtype)


class _Client:
    """vLLM's control plane: each call goes to every engine at once."""

    def __init__(self, targets: Targets, workers_per_engine: int) -> None:
        self.version = 0
        self._targets = targets
        self._workers_per_engine = workers_per_engine

    def _all(self, call: str, **arguments: Any) -> None:
        count = len(self._targets.members)
        self._targets.call_each("transfer", [{"call": call, **arguments}] * count)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine's workers take the ranks after those of the engines before it."""
        infos = []
        for index in range(len(self._targets.members)):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self._workers_per_engine
            infos.append({"call": "init_weight_transfer_engine", "init_info": info})
        self._targets.call_each("transfer", infos)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", version=self.version)


class NativeTransfer:
    """A `rollout.transports.Transport` over vLLM's API.

    Args:
        backend: "nccl", or "ipc" for engines on the learner's own GPU but in other processes.
        targets: the engines; started with `VLLMSettings.weight_transfer=backend`.
        workers_per_engine: `tensor_parallel_size`.
        dtype: what travels; None sends the learner's own dtype.
        timeout: seconds that a push may take.
    """

    def __init__(
        self,
        backend: str,
        targets: Targets,
        workers_per_engine: int = 1,
        dtype: torch.dtype | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.name = backend
        self._targets = targets
        self._workers_per_engine = workers_per_engine
        self._timeout = timeout
        self._source = _Source(dtype)
        self._client = _Client(targets, workers_per_engine)
        self._members: tuple[int, ...] | None = None
        self._trainer: Any = None

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Raises TimeoutError when the engines do not take part; the process must then end."""
        self._source.weights = [(name, tensor.detach()) for name, tensor in weights]
        self._client.version = version
        self._in_time(self._send)
        self._targets.note_push(version, frozenset(name for name, _ in self._source.weights))
        self._source.weights = []

    def _send(self) -> None:
        if self._members != self._targets.members:  # at first, and after an engine was replaced
            self.close()
            init = INIT[self.name](len(self._targets.members) * self._workers_per_engine)
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                init, client=self._client, source=self._source
            )
            self._members = self._targets.members
        self._trainer.send_weights()

    def _in_time(self, action: Callable[[], None]) -> None:
        """A collective that lost its peer never returns, so it runs in a thread that may be left behind."""
        outcome: list[BaseException | None] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                action()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run, name=f"{self.name} push", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if not outcome:
            raise TimeoutError(
                f"{self._targets.stacks()}\nthe learner waited {self._timeout:.0f} s for "
                f"{len(self._targets.members)} engines to take the {self.name} push"
            )
        if outcome[0] is not None:
            raise outcome[0]

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
        self._trainer, self._members = None, None
