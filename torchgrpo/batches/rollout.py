"""Rollout: groups together with their batch tensors, sliced by group.

environment ──Rollout──▶ assign_credit ──minibatches──▶ Rollout of an optimizer step ──▶ learner, monitor, ledger
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from envs.group import Group
from torchgrpo.batches.batch import Batch, collate


@dataclass
class Rollout:
    """Scored groups and their batch [N].

    The rows are the token sequences of the groups' completions, in order.

    Args:
        trained_at: policy version of the trainer, from which token ages are computed; None if the training weights
            sampled all tokens.
    """

    groups: list[Group]
    batch: Batch
    trained_at: int | None = None

    @classmethod
    def from_groups(cls, groups: Sequence[Group], trained_at: int | None = None) -> "Rollout":
        """Builds a rollout from scored groups of equal size."""
        batch = collate(groups)
        if trained_at is not None:
            batch.age = trained_at - batch.policy_version
        return cls(list(groups), batch, trained_at)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, numbers: Sequence[int]) -> "Rollout":
        """Selects groups by their indices, in the given order, with their rows."""
        rows = torch.arange(len(self.batch)).split(self.rows_per_group)
        chosen = self.batch[torch.cat([rows[number] for number in numbers])]
        return Rollout([self.groups[number] for number in numbers], chosen, self.trained_at)

    @property
    def rows_per_group(self) -> list[int]:
        """Number of rows of each group."""
        return [group.num_sequences for group in self.groups]

    def sampled_masks_by_engine(self, version: int) -> dict[str, Tensor]:
        """Returns masks [N, R] of the loss tokens sampled by policy version `version`, by engine."""
        batch = self.batch
        assert batch.mask is not None
        of_version = batch.mask & (batch.policy_version == version)
        engines = [one.engine for group in self.groups for one in group.completions for _ in range(one.num_sequences)]
        return {
            name: of_version & torch.tensor([engine == name for engine in engines], device=of_version.device)[:, None]
            for name in sorted(set(engines))
        }
