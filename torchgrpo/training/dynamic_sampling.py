"""Tests whether scored groups are trained on, by `policy.filter_range` (dynamic sampling, DAPO, arXiv:2503.14476).

a scored group ──group_filter──▶ trained on, or replaced while groups are collected
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from envs.group import Group
from torchgrpo.training.advantage import GroupRewards, best_margin, standard_deviation


def group_filter(policy: PolicyConfig) -> Callable[[Group], bool]:
    """Returns a thread-safe predicate for scored groups to train on.

    Dynamic sampling replaces the other groups.
    """
    if not policy.dynamic_batching:
        return lambda group: True
    return lambda group: bool(groups_to_train_on(policy, [group]))


def groups_to_train_on(policy: PolicyConfig, groups: Sequence[Group]) -> Tensor:
    """Returns a mask [P] of groups with a score and inside `policy.filter_range`."""
    verdicts = [group.verdicts for group in groups]
    return groups_inside_filter_range(
        policy,
        torch.tensor([[verdict.score for verdict in row] for row in verdicts], dtype=torch.float32),
        torch.tensor([[verdict.success for verdict in row] for row in verdicts], dtype=torch.float64),
        torch.tensor([[verdict.has_score for verdict in row] for row in verdicts]),
    )


def groups_inside_filter_range(policy: PolicyConfig, rewards: Tensor, success: Tensor, valid: Tensor) -> Tensor:
    """Returns a mask [P] of groups whose statistic lies strictly inside `filter_range`.

    Without a `filter_range` it holds all groups with a valid completion. A group without one is always outside.

    rewards, success (0 to 1), valid: [P, G].
    """
    has_valid = valid.any(dim=1)
    if policy.filter_range is None:
        return has_valid
    low, high = policy.filter_range
    statistic = FILTER_STATISTICS[policy.filter_on](rewards.double(), success.double(), valid)
    return has_valid & (statistic > low) & (statistic < high)


FILTER_STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "success": lambda rewards, success, valid: (
        torch.where(valid, success, 0.0).sum(dim=1) / valid.sum(dim=1).clamp_min(1)
    ),
    "reward_std": lambda rewards, success, valid: standard_deviation(
        GroupRewards.from_values(rewards, valid), 0
    ).squeeze(1),
    "margin": lambda rewards, success, valid: best_margin(GroupRewards.from_values(rewards, valid)).sum(dim=1),
}
