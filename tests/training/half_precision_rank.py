"""Script of one rank of tests/training/test_half_precision.py. Not a test file.

    PYTHONPATH=. python tests/training/half_precision_rank.py RANK RANKS FOLDER

The ranks divide fixed microbatches of a tiny model in bfloat16, and rank 0 saves the whole gradients.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from config.schema.models import LoraConfig
from config.schema.optimizer import OptimizerConfig
from tests.tiny_models import tiny_llama
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.optimizer import make_optimizer
from torchgrpo.training.sharding import (
    UnshardedContext,
    full_tensor,
    keep_float32_gradients,
    learner_mesh,
    no_sharding,
    shard_model,
)

MICROBATCHES, LENGTH = 4, 11
KINDS = {"weights": False, "adapters": True}
"""Whether adapters alone are trained, by kind."""


def gradients(adapters: bool, rank: int, ranks: int) -> dict[str, Tensor]:
    """Returns the full gradients of all microbatches, of which this rank computes its share."""
    model = tiny_llama().to(torch.bfloat16)
    policy = add_lora(model, LoraConfig(enabled=True, r=4)) if adapters else model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:  # zeros would leave half of the gradients zero
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    context: UnshardedContext = no_sharding
    if ranks > 1:
        root = shard_model(policy, learner_mesh("cpu", ranks, ranks), torch.bfloat16)
        with torch.no_grad():
            root(lambda: None)
        keep_float32_gradients(root)
        context = root
    make_optimizer(policy, OptimizerConfig())
    tokens = torch.randint(0, model.config.vocab_size, (MICROBATCHES, 2, LENGTH), generator=generator)
    for microbatch in tokens[rank::ranks]:
        hidden = context(partial(model.base_model, microbatch, use_cache=False)).last_hidden_state
        hidden.float().square().sum().backward()
    trained = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    return {name: full_tensor(gradient) for name, gradient in trained.items()}


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    for kind, adapters in KINDS.items():
        found = gradients(adapters, rank, ranks)
        if rank == 0:
            torch.save(found, folder / f"{kind}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
