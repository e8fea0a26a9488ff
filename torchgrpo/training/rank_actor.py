"""The actors of ranks: a process group, and in a learner rank its worker."""

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from config.schema.config import Config
from torchgrpo.batches.batch import Batch
from torchgrpo.cluster.calls import own_stacks
from torchgrpo.cluster.runtime import own_address
from torchgrpo.plan.plan import Plan
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.learner_models import make_sharded_models
from torchgrpo.training.process import prepare_process
from torchgrpo.training.published_weights import PolicyTensor, pushed_tensors
from torchgrpo.training.sharding import learner_mesh
from torchgrpo.training.worker import Part, Piece, Update, Worker

Sender = Callable[[Sequence[PolicyTensor], bool, int, Any], Exception | None]
"""Sends the tensors of a push, if this is the first rank, or gathers them with it: (tensors, first, version, engines).
Returns what is to be raised where the push began; `TransferFromRanks`."""

CONCURRENCY_GROUPS = {"watch": 1, "save": 1}
ALIGNMENT = 64
"""Bytes: what a block of tensors puts each of them at, whatever its dtype."""


@dataclass(frozen=True)
class Described:
    """A tensor of a push before it is made.

    identity: equal for the names of one tied tensor. constant: the learner's mark of what never changes, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: int
    constant: str | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_one_block(tensors: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    """The bytes of tensors, on the CPU, each at the next multiple of `ALIGNMENT`."""
    block = torch.empty(sum(aligned(tensor.nbytes) for tensor in tensors), dtype=torch.uint8)
    begins = 0
    for tensor in tensors:
        block[begins : begins + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        begins += aligned(tensor.nbytes)
    return block.numpy()


def aligned(nbytes: int) -> int:
    """What a tensor takes of a block."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class RankProcess:
    """One of several ranks that compute together.

    `join` comes first; all get the same calls in the same order.

    environment: set before anything is built (device selection).
    """

    timeout: timedelta

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)

    def free_address(self) -> str:
        """HOST:PORT at which the other ranks can reach this one."""
        with socket.socket() as probe:
            probe.bind((own_address(), 0))
            return f"{own_address()}:{probe.getsockname()[1]}"

    def join(self, rank: int, count: int, meeting_point: str, on_gpu: bool, timeout_s: float) -> int:
        """Meet the other ranks at `meeting_point`; returns this process's id.

        timeout_s: that a collective waits at most.
        """
        if meeting_point.startswith("file:"):  # all of them are on this machine: nobody listens elsewhere
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=meeting_point,
            rank=rank,
            world_size=count,
            timeout=limit,
        )
        self.timeout = limit
        return os.getpid()

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        return own_stacks()


class RankActor(RankProcess):
    """A learner rank. `build` follows `join`."""

    worker: Worker
    _saving: dist.ProcessGroup
    _writing: Callable[[], None]
    _sender: Sender

    def build(self, config: Config, plan: Plan) -> None:
        """This rank's shards of the models, and their worker."""
        device = torch.device("cpu") if plan.devices.on_cpu else torch.device("cuda", 0)
        prepare_process(config, plan.learner.num_threads, device)
        self._saving = dist.new_group(backend="gloo", timeout=self.timeout)
        mesh = learner_mesh(device.type, plan.devices.ranks, plan.learner.shard_size)
        models = make_sharded_models(config, plan, mesh, device)
        check_forward(models.scorer, plan.weight_check.prompts, plan.weight_check.learner)
        self.worker = Worker(config, models, pushed_tensors(config, plan))

    def begin_step(self) -> None:
        self.worker.begin_step()

    def gradients(self, pieces: Sequence[Piece]) -> Part:
        return self.worker.gradients(pieces)

    def update(self) -> Update:
        return self.worker.update()

    def log_prob(self, parts: Sequence[Batch]) -> list[Tensor]:
        return [scored.cpu() for scored in self.worker.log_prob(parts)]

    def scores(self, parts: Sequence[Batch]) -> list[Tensor]:
        return [scored.cpu() for scored in self.worker.scores(parts)]

    def reference_log_prob(self, parts: Sequence[Batch]) -> list[Tensor]:
        return [scored.cpu() for scored in self.worker.reference_log_prob(parts)]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return self.worker.score(sequences, temperature)

    def packs(self) -> bool:
        return self.worker.scorer.packs

    def vocab_size(self) -> int:
        return self.worker.vocab_size

    def describe(self) -> list[Described]:
        """Every tensor of a push, in the order in which `tensors` counts them."""
        known: dict[Any, int] = {}
        return [
            Described(
                one.name, one.shape, one.dtype, known.setdefault(one.identity, len(known)), one.constant
            )
            for one in self.worker.publish()
        ]

    def tensors(self, indices: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """The bytes of whole tensors, gathered from all ranks one after the other, as `in_one_block` lays them; rank 0
        alone returns them."""
        published = self.worker.publish()
        made = [published[index].make() for index in indices]
        return in_one_block(made) if dist.get_rank() == 0 else None

    def send_with(self, sender: Sender) -> None:
        """What `send` uses from now on."""
        self._sender = sender

    def send(self, version: int, engines: Any) -> Exception | None:
        """This rank's part of `Ranks.send`."""
        return self._sender(self.worker.publish(), dist.get_rank() == 0, version, engines)

    def begin_save(self, folder: Path) -> None:
        """Copy what is to be written; `end_save` writes it."""
        self._writing = self.worker.save(folder, self._saving)

    @ray.method(concurrency_group="save")
    def end_save(self) -> None:
        """Ends when this rank's part is on disk; the next steps may be made meanwhile."""
        self._writing()

    def release_memory(self) -> None:
        self.worker.release_memory()

    def numbers(self) -> dict[str, Any]:
        return self.worker.numbers()

    def load(self, folder: Path, numbers: dict[str, Any]) -> None:
        self.worker.load(folder, numbers, self._saving)
