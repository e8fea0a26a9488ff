"""What a rank does in tests/training/test_checkpoints_of_ranks.py. Not a test file.

    PYTHONPATH=. python tests/training/ranks_that_save.py RANK RANKS FOLDER

A tiny model learns for some steps, sharded over the ranks, or whole where there is one.
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
from torchgrpo.training.checkpoint_tensors import copied, read_tensors, saved_shapes, write_tensors
from torchgrpo.training.learner_state import learner_tensors, load_step_counts, step_counts
from torchgrpo.training.optimizer import make_optimizer

STEPS = 3
COUNTS = "counts.pt"


class Learning:
    """Two layers, one with an uneven number of rows, and AdamW."""

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
        """Every rank has the whole batch, so the mean of their gradients is that of one process."""
        generator = torch.Generator().manual_seed(number)
        given, wanted = (torch.randn(8, width, generator=generator) for width in (6, 5))
        (self.model(given) - wanted).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return learner_tensors(self.model, self.optimizer)

    def save(self, folder: Path) -> None:
        """In one process."""
        write_tensors(folder, self.tensors())
        torch.save(step_counts(self.model, self.optimizer), folder / COUNTS)

    def load(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        assert saved_shapes(folder).keys() == self.tensors().keys()
        read_tensors(folder, self.tensors(), group)
        counts = torch.load(folder / COUNTS, weights_only=True)
        assert set(counts.values()) == {STEPS}
        load_step_counts(self.model, self.optimizer, counts)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one.detach() for name, one in tensors.items()
    }


def saved_while_it_goes_on(learning: Learning, folder: Path, steps: range) -> None:
    """A thread writes a copy, with a group of its own, while the ranks' own collectives go on."""
    group = dist.new_group(backend="gloo")
    copy, counts = copied(learning.tensors()), step_counts(learning.model, learning.optimizer)
    thread = Thread(target=write_tensors, args=(folder, copy, group))
    thread.start()
    for number in steps:
        learning.step(number)
    thread.join()
    if dist.get_rank() == 0:
        torch.save(counts, folder / COUNTS)
    dist.barrier()


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    learning = Learning(ranks)
    for number in range(STEPS):
        learning.step(number)
    saved_while_it_goes_on(learning, folder / "by_ranks", range(STEPS, 2 * STEPS))
    ends = {"never_stopped": whole(learning.tensors())}
    for name in ("by_ranks", "by_one"):
        again = Learning(ranks)
        again.load(folder / name, dist.group.WORLD)
        for number in range(STEPS, 2 * STEPS):
            again.step(number)
        ends[name] = whole(again.tensors())
    if rank == 0:
        torch.save(ends, folder / "ends.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
