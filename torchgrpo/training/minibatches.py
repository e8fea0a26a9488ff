"""An iteration's groups as optimizer-step batches: each group once per epoch."""

from collections.abc import Iterator

import torch

from torchgrpo.training.batch import Batch


def minibatches(
    batch: Batch, repeats: int, groups_per_step: int, epochs: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Slices of `batch` [num_groups * repeats]; a single slice keeps the order, so it costs no copy.

    Groups that do not fill a last slice (after dynamic sampling gave up early, say) form a smaller one.
    """
    num_groups = batch.batch_size[0] // repeats
    for _ in range(epochs):
        if num_groups <= groups_per_step:
            yield batch
            continue
        order = torch.randperm(num_groups, generator=generator)
        for chosen in order.split(groups_per_step):
            rows = (chosen[:, None] * repeats + torch.arange(repeats)).flatten()
            yield batch[rows]
