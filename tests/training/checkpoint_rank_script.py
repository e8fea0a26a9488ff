"""Script of one rank of tests/training/test_checkpoints_of_ranks.py. Not a test file.

    PYTHONPATH=. python tests/training/checkpoint_rank_script.py RANK RANKS FOLDER

A tiny model is trained for some steps, sharded over the ranks, or unsharded with one rank.
"""

import sys
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.checkpoint_tensors import copy_to_cpu, read_tensors, saved_shapes, write_tensors
from torchgrpo.training.learner_state import learner_tensors, load_step_counts, step_counts
from torchgrpo.training.optimizer import make_optimizer

STEPS = 3
COUNTS = "counts.pt"


class TinyTraining:
    """A model of two layers, one with an uneven number of rows, and AdamW."""

    def __init__(self, ranks: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False))
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in (self.model[0], self.model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = make_optimizer(self.model, OptimizerConfig(lr=1e-2, weight_decay=0.1))

    def step(self, number: int) -> None:
        """Makes a step on the whole batch.

        Every rank has the whole batch, so the mean of their gradients equals the gradient of one process.
        """
        generator = torch.Generator().manual_seed(number)
        inputs, targets = (torch.randn(8, width, generator=generator) for width in (6, 5))
        (self.model(inputs) - targets).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return learner_tensors(self.model, self.optimizer)

    def save(self, folder: Path) -> None:
        """Saves the tensors and step counts of a single process."""
        write_tensors(folder, self.tensors())
        torch.save(step_counts(self.model, self.optimizer), folder / COUNTS)

    def load(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        assert saved_shapes(folder).keys() == self.tensors().keys()
        read_tensors(folder, self.tensors(), group)
        counts = torch.load(folder / COUNTS, weights_only=True)
        assert set(counts.values()) == {STEPS}
        load_step_counts(self.model, self.optimizer, counts)


def full_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.full_tensor() if isinstance(one, DTensor) else one.detach() for name, one in tensors.items()}


def save_during_steps(training: TinyTraining, folder: Path, steps: range) -> None:
    """Writes a copy in a thread while the ranks make steps.

    The thread has a process group of its own.
    """
    group = dist.new_group(backend="gloo")
    copy, counts = copy_to_cpu(training.tensors()), step_counts(training.model, training.optimizer)
    thread = Thread(target=write_tensors, args=(folder, copy, group))
    thread.start()
    for number in steps:
        training.step(number)
    thread.join()
    if dist.get_rank() == 0:
        torch.save(counts, folder / COUNTS)
    dist.barrier()


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    training = TinyTraining(ranks)
    for number in range(STEPS):
        training.step(number)
    save_during_steps(training, folder / "by_ranks", range(STEPS, 2 * STEPS))
    results = {"never_stopped": full_tensors(training.tensors())}
    for name in ("by_ranks", "by_one"):
        resumed = TinyTraining(ranks)
        resumed.load(folder / name, dist.group.WORLD)
        for number in range(STEPS, 2 * STEPS):
            resumed.step(number)
        results[name] = full_tensors(resumed.tensors())
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
