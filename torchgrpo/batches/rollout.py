"""Groups and the tensors made of them, as one object that is sliced by group.

environment ──Rollout──▶ credit ──minibatches──▶ Rollout of each optimizer step ──▶ learner, monitor, ledger
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from envs.group import Group
from torchgrpo.batches.batch import Batch, collate


@dataclass
class Rollout:
    """Judged groups and their batch [N], whose row `g * repeats + i` is completion `i` of group `g`.

    trained_at: policy version that the ages of tokens are counted to; None where the same weights sampled all of them.
    """

    groups: list[Group]
    batch: Batch
    trained_at: int | None = None

    @classmethod
    def of(cls, groups: Sequence[Group], trained_at: int | None = None) -> "Rollout":
        """Make the tensors of judged groups, all of as many completions, with ages where `trained_at` is given."""
        batch = collate(groups)
        if trained_at is not None:
            batch.age = trained_at - batch.policy_version
        return cls(list(groups), batch, trained_at)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, numbers: Sequence[int]) -> "Rollout":
        """The groups of these numbers, in this order, with their rows."""
        repeats = len(self.batch) // len(self.groups)
        rows = (torch.tensor(numbers)[:, None] * repeats + torch.arange(repeats)).flatten()
        return Rollout([self.groups[number] for number in numbers], self.batch[rows], self.trained_at)

    def sampled_tokens(self, version: int) -> dict[str, Tensor]:
        """Masks [N, R] of the tokens in the loss that policy version `version` sampled, by engine."""
        batch = self.batch
        assert batch.mask is not None
        own = batch.mask & (batch.policy_version == version)
        engines = [one.engine for group in self.groups for one in group.completions]
        return {
            name: own & torch.tensor([engine == name for engine in engines], device=own.device)[:, None]
            for name in sorted(set(engines))
        }
