"""An iteration's groups as optimizer-step batches, and those as microbatches: each group once per epoch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from training.batch import Batch


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


@dataclass(frozen=True)
class Microbatch:
    """Completions that go through the model together. `rows` [n] int64: their places in the batch."""

    rows: torch.Tensor
    batch: Batch


def microbatches(batch: Batch, together: int, rows: int) -> list[Microbatch]:
    """`batch` in pieces of `rows` rows, those with the longest responses first.

    A piece is as wide as its longest response, so responses of like length together save most of the padding; the
    largest piece comes first, which finds out at once whether the memory suffices. A batch that is one piece stays
    as it is.

    together: rows that stay side by side, `ResponseScorer.together`; divides `rows` and the batch.
    """
    count = batch.batch_size[0]
    if count <= rows:
        return [Microbatch(torch.arange(count), batch)]
    lengths = batch.tokens.response_mask.sum(-1).view(-1, together).amax(-1)
    first = lengths.argsort(descending=True, stable=True).cpu()
    order = (first[:, None] * together + torch.arange(together)).flatten()
    return [Microbatch(places, batch[places]) for places in order.split(rows)]
