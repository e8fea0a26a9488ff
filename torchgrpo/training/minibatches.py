"""Optimizer-step minibatches of a rollout: each group once per epoch."""

from collections.abc import Iterator

import torch

from torchgrpo.batches.rollout import Rollout


def minibatches(
    rollout: Rollout, groups_per_step: int, epochs: int, generator: torch.Generator
) -> Iterator[Rollout]:
    """Slices of `rollout`; a single slice keeps the order, so it costs no copy.

    Groups that do not fill a last slice (after dynamic sampling gave up early, say) form a smaller one.
    """
    for _ in range(epochs):
        if len(rollout) <= groups_per_step:
            yield rollout
            continue
        order = torch.randperm(len(rollout), generator=generator)
        for chosen in order.split(groups_per_step):
            yield rollout[chosen.tolist()]
