"""Ray actor base that joins a process group, and the actor of a learner rank."""

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
from torchgrpo.cluster.actor_calls import dump_own_stacks
from torchgrpo.cluster.runtime import node_address
from torchgrpo.plan.plan import Plan
from torchgrpo.training.context_parallel import join_context_group
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.learner_models import make_sharded_models
from torchgrpo.training.process_setup import prepare_process
from torchgrpo.training.published_weights import PolicyTensor, push_tensor_source
from torchgrpo.training.sharding import learner_mesh
from torchgrpo.training.worker import MicrobatchTask, UpdateResult, Worker, WorkerOutput

Sender = Callable[[Sequence[PolicyTensor], bool, int, Any], Exception | None]
"""Function of each rank in a push: `(tensors, is_first_rank, version, engines)`; `ShardedWeightTransfer`.

The first rank sends the tensors, the others gather them with it. Returns the exception to raise in the
driver, or None.
"""

CONCURRENCY_GROUPS = {"watch": 1, "save": 1}
ALIGNMENT = 64
"""Bytes; every tensor in a block begins at a multiple, whatever its dtype."""


@dataclass(frozen=True)
class TensorDescription:
    """Name, shape and dtype of a tensor of a push, before its values exist.

    identity: equal for the names of one tied tensor. constant: identifier of the learner in which the tensor
    is frozen, otherwise None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: int
    constant: str | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def pack_tensors(tensors: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    """Packs tensors into one block of bytes on the CPU.

    Each tensor begins at the next multiple of `ALIGNMENT`.
    """
    block = torch.empty(sum(aligned_nbytes(tensor.nbytes) for tensor in tensors), dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        block[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start += aligned_nbytes(tensor.nbytes)
    return block.numpy()


def aligned_nbytes(nbytes: int) -> int:
    """Returns the bytes that a tensor takes in a block."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class RankProcess:
    """Base class of rank actors, which joins the process group of its ranks.

    All ranks get the same calls in the same order, `join` first. environment: environment variables that are
    set before anything is built (device selection).
    """

    timeout: timedelta

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)

    def free_address(self) -> str:
        """Returns an address HOST:PORT at which the other ranks can reach this one."""
        with socket.socket() as probe:
            probe.bind((node_address(), 0))
            return f"{node_address()}:{probe.getsockname()[1]}"

    def join(self, rank: int, count: int, meeting_point: str, on_gpu: bool, timeout_s: float) -> int:
        """Joins the process group at `meeting_point`; returns the id of this process.

        timeout_s: longest wait in a collective.
        """
        if meeting_point.startswith("file:"):  # all ranks are on this machine
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
        """Returns the stacks of all threads of this process."""
        return dump_own_stacks()


class RankActor(RankProcess):
    """Ray actor of a learner rank, which passes its calls to a `Worker`.

    `build` must follow `join`.
    """

    worker: Worker
    _save_group: dist.ProcessGroup
    _finish_save: Callable[[], None]
    _sender: Sender

    def build(self, config: Config, plan: Plan) -> None:
        """Builds this rank's shards of the models, and their worker."""
        device = torch.device("cpu") if plan.devices.on_cpu else torch.device("cuda", 0)
        prepare_process(config, plan.learner.num_threads, device)
        self._save_group = dist.new_group(backend="gloo", timeout=self.timeout)
        mesh = learner_mesh(device.type, plan.devices.ranks, plan.learner.shard_size)
        context = join_context_group(config.train_model.context_parallel, self.timeout)
        models = make_sharded_models(config, plan, mesh, device, context)
        check_forward(models.scorer, plan.weight_check.prompts, plan.weight_check.learner)
        self.worker = Worker(config, models, push_tensor_source(config, plan))

    def begin_step(self) -> None:
        self.worker.begin_step()

    def gradients(self, tasks: Sequence[MicrobatchTask]) -> None:
        self.worker.gradients(tasks)

    def take_output(self) -> WorkerOutput:
        return self.worker.take_output()

    def update(self) -> UpdateResult:
        return self.worker.update()

    def log_prob(self, batches: Sequence[Batch]) -> list[Tensor]:
        return self.worker.log_prob(batches)

    def log_prob_and_entropy(self, batches: Sequence[Batch]) -> list[Tensor]:
        return self.worker.log_prob_and_entropy(batches)

    def reference_log_prob(self, batches: Sequence[Batch]) -> list[Tensor]:
        return self.worker.reference_log_prob(batches)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return self.worker.score(sequences, temperature)

    def packs(self) -> bool:
        return self.worker.scorer.packs

    def vocab_size(self) -> int:
        return self.worker.vocab_size

    def describe_tensors(self) -> list[TensorDescription]:
        """Describes every tensor of a push, in the order of the indices of `gather_tensors`."""
        identities: dict[Any, int] = {}
        return [
            TensorDescription(
                one.name, one.shape, one.dtype, identities.setdefault(one.identity, len(identities)), one.constant
            )
            for one in self.worker.publish()
        ]

    def gather_tensors(self, indices: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """Gathers full tensors from all ranks, one after the other.

        Rank 0 returns their bytes, as `pack_tensors` lays them out; the other ranks return None.
        """
        published = self.worker.publish()
        tensors = [published[index].make() for index in indices]
        return pack_tensors(tensors) if dist.get_rank() == 0 else None

    def set_sender(self, sender: Sender) -> None:
        """Sets the sender of the following calls of `send`."""
        self._sender = sender

    def send(self, version: int, engines: Any) -> Exception | None:
        """Does this rank's part of `Ranks.send`."""
        return self._sender(self.worker.publish(), dist.get_rank() == 0, version, engines)

    def begin_save(self, folder: Path) -> None:
        """Copies the tensors of a checkpoint; `end_save` writes them."""
        self._finish_save = self.worker.save(folder, self._save_group)

    @ray.method(concurrency_group="save")
    def end_save(self) -> None:
        """Writes this rank's shards and returns when they are on disk.

        Steps may be made meanwhile.
        """
        self._finish_save()

    def release_memory(self) -> None:
        self.worker.release_memory()

    def scalar_state(self) -> dict[str, Any]:
        return self.worker.scalar_state()

    def load(self, folder: Path, scalar_state: dict[str, Any]) -> None:
        self.worker.load(folder, scalar_state, self._save_group)
