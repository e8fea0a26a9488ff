"""Which groups are trained on at all, and which are replaced by another: dynamic sampling (DAPO, arXiv:2503.14476).

a judged group ──group_filter──▶ trained on, or replaced (asked while groups are made)
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from envs.group import Group
from torchgrpo.training.advantage import Rewards, deviation, lead


def group_filter(policy: PolicyConfig) -> Callable[[Group], bool]:
    """A predicate of judged groups that are to be trained on; dynamic sampling replaces the others. Thread-safe."""
    if not policy.dynamic_batching:
        return lambda group: True
    return lambda group: bool(in_range(policy, [group]))


def in_range(policy: PolicyConfig, groups: Sequence[Group]) -> Tensor:
    """[P] bool: the groups inside `policy.filter_range` that hold a completion which could be judged."""
    verdicts = [group.verdicts for group in groups]
    return groups_in_range(
        policy,
        torch.tensor([[verdict.score for verdict in row] for row in verdicts], dtype=torch.float32),
        torch.tensor([[verdict.success for verdict in row] for row in verdicts], dtype=torch.float64),
        torch.tensor([[verdict.judged for verdict in row] for row in verdicts]),
    )


def groups_in_range(policy: PolicyConfig, rewards: Tensor, success: Tensor, valid: Tensor) -> Tensor:
    """[P] bool: the groups whose statistic lies strictly inside `filter_range`; all of them when it is unset.

    rewards, success (0 to 1), valid: [P, G]. A group without a valid member is outside.
    """
    some = valid.any(dim=1)
    if policy.filter_range is None:
        return some
    low, high = policy.filter_range
    statistic = FILTER_STATISTICS[policy.filter_on](rewards.double(), success.double(), valid)
    return some & (statistic > low) & (statistic < high)


FILTER_STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "success": lambda rewards, success, valid: (
        torch.where(valid, success, 0.0).sum(dim=1) / valid.sum(dim=1).clamp_min(1)
    ),
    "reward_std": lambda rewards, success, valid: deviation(Rewards.of(rewards, valid), 0).squeeze(1),
    "lead": lambda rewards, success, valid: lead(Rewards.of(rewards, valid)).sum(dim=1),
}
