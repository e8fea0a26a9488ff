"""Tokens of a batch by the engine that sampled them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from envs.group import Group
from training.batch import Batch


def sampled_tokens(batch: Batch, groups: Sequence[Group], version: int) -> Mapping[str, Tensor]:
    """Masks [N, R] of the tokens in the loss that `version` sampled, by the engine's name."""
    assert batch.mask is not None
    own = batch.mask & (batch.policy_version == version)
    engines = [one.engine for group in groups for one in group.completions]
    return {
        name: own & torch.tensor([engine == name for engine in engines], device=own.device)[:, None]
        for name in sorted(set(engines))
    }
