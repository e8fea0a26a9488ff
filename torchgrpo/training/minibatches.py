"""Splits a rollout into minibatches of optimizer steps, each group once per epoch."""

from collections.abc import Iterator

import torch

from torchgrpo.batches.rollout import Rollout


def minibatches(rollout: Rollout, groups_per_step: int, epochs: int, generator: torch.Generator) -> Iterator[Rollout]:
    """Yields the minibatches of a rollout in random order of the groups.

    A rollout of a single minibatch keeps its order and is not copied. Groups left over (after dynamic sampling
    gave up early, for example) form a smaller last minibatch.
    """
    for _ in range(epochs):
        if len(rollout) <= groups_per_step:
            yield rollout
            continue
        order = torch.randperm(len(rollout), generator=generator)
        for chosen in order.split(groups_per_step):
            yield rollout[chosen.tolist()]
