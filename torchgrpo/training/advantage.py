"""Computes group-relative advantages, whitens them over the batch, and computes the KL penalty on rewards.

All statistics are float64 and without gradient. Shapes: P groups of G completions ([P, G]), or N = P * G
completions ([N]).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.kl import kl_estimate


@dataclass(frozen=True)
class GroupRewards:
    """Rewards of P groups, [P, G] each.

    values: rewards, 0 where not valid.
    relative: rewards less the first valid reward of the group, so that equal rewards give exact zeros and a
        large common offset (1e8 and 1e8 + 1) costs no digits.
    valid: bool.
    count: [P, 1], valid rewards of each group.
    lengths: response lengths in tokens.
    """

    values: Tensor
    relative: Tensor
    valid: Tensor
    count: Tensor
    lengths: Tensor

    @classmethod
    def from_values(cls, values: Tensor, valid: Tensor, lengths: Tensor | None = None) -> "GroupRewards":
        """Builds the tensors from rewards `values` [P, G] float64 and `valid` [P, G] bool."""
        values = torch.where(valid, values, 0.0)
        count = valid.sum(dim=1, keepdim=True)
        lengths = torch.where(valid, torch.ones_like(values) if lengths is None else lengths.double(), 0.0)
        first = values.gather(1, valid.int().argmax(dim=1, keepdim=True))
        return cls(values, torch.where(valid, values - first, 0.0), valid, count, lengths)


def batch_advantage(
    policy: PolicyConfig, rewards: Tensor, valid: Tensor, mask: Tensor, components: Sequence[tuple[float, Tensor]] = ()
) -> Tensor:
    """Computes the advantage of each completion, or of each token, of a batch.

    rewards, valid: as for `group_advantage`. mask: bool [N, R], N = P * G, the tokens that the policy sampled.
    components: weight and values [P, G] of each reward component, for `reward_components=separate`; without
        components the reward itself is used. Non-finite values count as missing.

    Returns float64 [N, 1], or [N, R] with a `discount`. Values are finite; they are 0 where not valid.
    """
    lengths = mask.sum(dim=1).view(rewards.shape)
    if policy.reward_components == "separate" and components:
        weighted = [weight * group_advantage(policy, values, valid, lengths) for weight, values in components]
        advantage = torch.stack(weighted).sum(dim=0)
    else:
        advantage = group_advantage(policy, rewards, valid, lengths)
    valid = (valid & rewards.isfinite()).view(-1, 1)
    advantage = advantage.view(-1, 1)
    if policy.discount != 1:
        later = mask.sum(dim=1, keepdim=True) - mask.cumsum(dim=1)
        advantage = torch.where(mask, advantage * policy.discount ** later.double(), 0.0)
    return whiten_advantage(policy, advantage, valid, mask)


def whiten_advantage(policy: PolicyConfig, advantage: Tensor, valid: Tensor, mask: Tensor) -> Tensor:
    """Whitens advantages [N, 1] or [N, R] over the batch by `policy.whiten`.

    valid: bool [N, 1], completions that enter the statistics. mask: bool [N, R], the tokens that the policy sampled.
    """
    weight = WHITENING_WEIGHTS[policy.whiten](advantage, mask)
    if weight is None:
        return advantage
    weight = torch.where(valid, weight, 0.0)
    count = weight.sum()
    mean = (weight * advantage).sum() / count.clamp_min(1)
    # Do not shift advantages that are already centred up to rounding, such as those of groups with equal
    # rewards.
    rounding = 1e-12 * advantage.abs().amax()
    centred = advantage - torch.where(mean.abs() > rounding, mean, 0.0)
    if policy.whiten_scale == "none":
        return torch.where(weight > 0, centred, 0.0)
    variance = (weight * centred.square()).sum() / (count - VARIANCE_CORRECTIONS[policy.whiten_scale]).clamp_min(1)
    divisor = WHITENING_DIVISORS[policy.whiten_epsilon_rule](variance.sqrt(), policy.whiten_epsilon)
    return torch.where((weight > 0) & (variance > 0), centred / divisor, 0.0)


def group_advantage(
    policy: PolicyConfig, rewards: Tensor, valid: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """Computes the advantage of each completion within its group.

    rewards: [P, G], any dtype. valid: [P, G] bool. Completions that are not valid or have a non-finite reward
    enter no statistic and get 0. lengths: [P, G], for `baseline=length_weighted`; None: equal lengths.

    Returns [P, G] float64, finite everywhere.

    Edge cases: equal valid rewards give exactly 0 (with `baseline=none` and `scale=none` they stay unchanged).
    A group with one valid completion follows `group_of_one`. A group without a valid completion gets 0.
    """
    rewards = rewards.double()
    if rewards.numel() == 0:
        return rewards
    valid = rewards.isfinite() if valid is None else valid.bool() & rewards.isfinite()
    group = GroupRewards.from_values(rewards, valid, lengths)
    centred = BASELINES[policy.baseline](group)
    deviation = SCALES[policy.scale](group)
    if policy.group_of_one == "raw":
        alone = group.count == 1
        centred = torch.where(alone, group.values, centred)
        if policy.scale in GROUP_SCALES:
            deviation = torch.where(alone, 1.0, deviation)
    divisor = DIVISORS[policy.epsilon_rule](deviation, policy.epsilon if policy.scale != "none" else 0.0)
    undivided = centred if policy.scale == "std_leave_one_out" else torch.zeros_like(centred)
    return torch.where(valid, torch.where(deviation > 0, centred / divisor, undivided), 0.0)


def _minus_group_mean(group: GroupRewards) -> Tensor:
    """Subtracts the mean reward of each group, [P, G]."""
    return group.relative - group.relative.sum(dim=1, keepdim=True) / group.count.clamp_min(1)


def _minus_length_weighted_mean(group: GroupRewards) -> Tensor:
    """Subtracts the length-weighted mean reward of each group, [P, G]."""
    total = group.lengths.sum(dim=1, keepdim=True)
    return group.relative - (group.lengths * group.relative).sum(dim=1, keepdim=True) / total.clamp_min(1)


def best_margin(group: GroupRewards) -> Tensor:
    """Computes the margin of the best reward over the second best.

    Returns [P, G], 0 except for the best completion of each group (pass@k training, arXiv 2508.10751, as in verl).
    """
    if group.values.shape[1] < 2:
        return torch.zeros_like(group.values)
    ordered = torch.where(group.valid, group.relative, -torch.inf).topk(2, dim=1)
    distance = torch.where(group.count > 1, ordered.values[:, :1] - ordered.values[:, 1:], 0.0)
    return torch.zeros_like(group.values).scatter(1, ordered.indices[:, :1], distance)


BASELINES: dict[str, Callable[[GroupRewards], Tensor]] = {
    "mean": _minus_group_mean,
    "leave_one_out": lambda group: _minus_group_mean(group) * group.count / (group.count - 1).clamp_min(1),
    "length_weighted": _minus_length_weighted_mean,
    "second_best": best_margin,
    "none": lambda group: group.values,
}


def standard_deviation(group: GroupRewards, correction: int) -> Tensor:
    """Computes the standard deviation [P, 1] of each group's valid rewards.

    correction: subtracted from the count, as in `torch.std`.
    """
    centred = torch.where(group.valid, _minus_group_mean(group), 0.0)
    return (centred.square().sum(dim=1, keepdim=True) / (group.count - correction).clamp_min(1)).sqrt()


def _leave_one_out_deviation(group: GroupRewards) -> Tensor:
    """Computes the unbiased standard deviation [P, G] of the other completions' rewards.

    The sums of the group are reduced by the terms of the completion itself. The result is 0 if the others are
    equal.
    """
    centred = torch.where(group.valid, _minus_group_mean(group), 0.0)
    others = (group.count - 1).clamp_min(1)
    squares = centred.square().sum(dim=1, keepdim=True) - centred.square() - centred.square() / others
    spread = centred.abs().amax(dim=1, keepdim=True)
    squares = torch.where(squares > 1e-12 * spread.square(), squares, 0.0)
    return (squares / (group.count - 2).clamp_min(1)).sqrt()


def _group_mean(group: GroupRewards) -> Tensor:
    """Computes the mean reward [P, 1] of each group; 0 for a group of one."""
    mean = group.values.sum(dim=1, keepdim=True) / group.count.clamp_min(1)
    return torch.where(group.count > 1, mean, 0.0)


SCALES: dict[str, Callable[[GroupRewards], Tensor]] = {
    "std_unbiased": lambda group: standard_deviation(group, correction=1),
    "std_population": lambda group: standard_deviation(group, correction=0),
    "std_leave_one_out": _leave_one_out_deviation,
    "batch": lambda group: standard_deviation(
        GroupRewards.from_values(group.values.reshape(1, -1), group.valid.reshape(1, -1)), correction=1
    ),
    "mean": _group_mean,
    "nonzero_share": lambda group: ((group.values != 0).sum().double() / group.valid.sum().clamp_min(1)).reshape(1, 1),
    "none": lambda group: group.values.new_ones(1, 1),
}
GROUP_SCALES = frozenset({"std_unbiased", "std_population", "std_leave_one_out", "mean"})
"""Scales computed within a group, undefined for a group of one."""
DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": lambda deviation, epsilon: deviation + epsilon,
    "clamp": lambda deviation, epsilon: deviation.clamp_min(epsilon),
}


WHITENING_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "none": lambda advantage, mask: None,
    "rollouts": lambda advantage, mask: torch.ones_like(advantage),
    "tokens": lambda advantage, mask: (
        mask if advantage.shape == mask.shape else mask.sum(dim=1, keepdim=True)
    ).double(),
}
"""Weight of each advantage in the batch statistics; `tokens`: the number of tokens with this advantage."""
WHITENING_DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": DIVISORS["add"],
    "clamp": lambda deviation, epsilon: deviation.clamp_min(math.sqrt(epsilon)),
    "inside": lambda deviation, epsilon: (deviation.square() + epsilon).sqrt(),
}
VARIANCE_CORRECTIONS = {"std_unbiased": 1, "std_population": 0}


def kl_reward_penalty(policy: PolicyConfig, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Computes the KL penalty [N] that `kl_placement=reward` subtracts from each reward.

    log_prob: [N, R], of the policy that sampled. ref_log_prob, mask: [N, R].
    """
    if policy.kl_placement != "reward":
        return log_prob.new_zeros(log_prob.shape[0])
    per_token = kl_estimate(policy, log_prob, ref_log_prob, mask.bool())
    return policy.kl_coef * per_token.sum(dim=1)
