"""Rewards to advantages, one group at a time.

Everything here is small, exact and outside the graph: statistics in float64, no gradient. Shapes: P groups of
G members ([P, G]) or N = P * G responses ([N]).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.kl import kl_estimate


@dataclass(frozen=True)
class Rewards:
    """Rewards of groups, [P, G] each (count: [P, 1]).

    relative: to a row's first valid reward, so that equal rewards give exact zeros and a large common offset (1e8 and
    1e8 + 1) costs no digits. lengths: of the responses, in tokens.
    """

    values: Tensor
    relative: Tensor
    valid: Tensor
    count: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, values: Tensor, valid: Tensor, lengths: Tensor | None = None) -> "Rewards":
        """values: [P, G] float64. valid: bool."""
        values = torch.where(valid, values, 0.0)
        count = valid.sum(dim=1, keepdim=True)
        lengths = torch.where(valid, torch.ones_like(values) if lengths is None else lengths.double(), 0.0)
        first = values.gather(1, valid.int().argmax(dim=1, keepdim=True))
        return cls(values, torch.where(valid, values - first, 0.0), valid, count, lengths)


def batch_advantage(
    policy: PolicyConfig,
    rewards: Tensor,
    valid: Tensor,
    mask: Tensor,
    parts: Sequence[tuple[float, Tensor]] = (),
) -> Tensor:
    """Advantage of every response of a batch, or of every token of it.

    rewards, valid: as for `group_advantage`. mask: bool [N, R], N = P * G, the tokens that the policy drew.
    parts: weight and values [P, G] of each part of the reward, for `reward_parts=apart`; none: the reward is the part.
    Values that are not finite are missing.

    Returns float64 [N, 1], or [N, R] with a `discount`, finite everywhere; 0 for what is not valid.
    """
    lengths = mask.sum(dim=1).view(rewards.shape)
    if policy.reward_parts == "apart" and parts:
        weighted = [weight * group_advantage(policy, values, valid, lengths) for weight, values in parts]
        advantage = torch.stack(weighted).sum(dim=0)
    else:
        advantage = group_advantage(policy, rewards, valid, lengths)
    valid = (valid & rewards.isfinite()).view(-1, 1)
    advantage = advantage.view(-1, 1)
    if policy.discount != 1:
        later = mask.sum(dim=1, keepdim=True) - mask.cumsum(dim=1)
        advantage = torch.where(mask, advantage * policy.discount ** later.double(), 0.0)
    weight = WHITENED[policy.whiten](advantage, mask)
    if weight is None:
        return advantage
    weight = torch.where(valid, weight, 0.0)
    count = weight.sum()
    mean = (weight * advantage).sum() / count.clamp_min(1)
    # What was centred already, and a group of equal rewards, stays as it is.
    rounding = 1e-12 * advantage.abs().amax()
    centred = advantage - torch.where(mean.abs() > rounding, mean, 0.0)
    if policy.whiten_scale == "none":
        return torch.where(weight > 0, centred, 0.0)
    variance = (weight * centred.square()).sum() / (count - DEGREES_LOST[policy.whiten_scale]).clamp_min(1)
    divisor = WHITENING_DIVISORS[policy.whiten_epsilon_rule](variance.sqrt(), policy.whiten_epsilon)
    return torch.where((weight > 0) & (variance > 0), centred / divisor, 0.0)


def group_advantage(
    policy: PolicyConfig, rewards: Tensor, valid: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """Advantage of every member of every group.

    rewards: [P, G], any dtype. valid: [P, G] bool. Members that are not valid, and members whose reward is
    not finite, take no part in any statistic and get 0. lengths: [P, G], for `baseline=length_weighted`; None: equal.
    Returns [P, G] float64, finite everywhere.

    Defined edges: valid rewards that are all equal give exactly 0 (with `baseline=none` and `scale=none` they
    stay as they are); a group with one valid member follows `group_of_one`; one with none gets 0.
    """
    rewards = rewards.double()
    if rewards.numel() == 0:
        return rewards
    valid = rewards.isfinite() if valid is None else valid.bool() & rewards.isfinite()
    group = Rewards.of(rewards, valid, lengths)
    centred = BASELINES[policy.baseline](group)
    deviation = SCALES[policy.scale](group)
    if policy.group_of_one == "raw":
        alone = group.count == 1
        centred = torch.where(alone, group.values, centred)
        if policy.scale in OF_THE_GROUP:
            deviation = torch.where(alone, 1.0, deviation)
    divisor = DIVISORS[policy.epsilon_rule](deviation, policy.epsilon if policy.scale != "none" else 0.0)
    undivided = centred if policy.scale == "std_leave_one_out" else torch.zeros_like(centred)
    return torch.where(valid, torch.where(deviation > 0, centred / divisor, undivided), 0.0)


def _from_mean(group: Rewards) -> Tensor:
    return group.relative - group.relative.sum(dim=1, keepdim=True) / group.count.clamp_min(1)


def _from_length_weighted_mean(group: Rewards) -> Tensor:
    total = group.lengths.sum(dim=1, keepdim=True)
    return group.relative - (group.lengths * group.relative).sum(dim=1, keepdim=True) / total.clamp_min(1)


def lead(group: Rewards) -> Tensor:
    """[P, G]: of the best over the second best (pass@k training, arXiv 2508.10751; as verl computes it)."""
    if group.values.shape[1] < 2:
        return torch.zeros_like(group.values)
    ordered = torch.where(group.valid, group.relative, -torch.inf).topk(2, dim=1)
    distance = torch.where(group.count > 1, ordered.values[:, :1] - ordered.values[:, 1:], 0.0)
    return torch.zeros_like(group.values).scatter(1, ordered.indices[:, :1], distance)


BASELINES: dict[str, Callable[[Rewards], Tensor]] = {
    "mean": _from_mean,
    "leave_one_out": lambda group: _from_mean(group) * group.count / (group.count - 1).clamp_min(1),
    "length_weighted": _from_length_weighted_mean,
    "runner_up": lead,
    "none": lambda group: group.values,
}


def deviation(group: Rewards, degrees_lost: int) -> Tensor:
    """[P, 1]: of a group's valid rewards from their mean."""
    centred = torch.where(group.valid, _from_mean(group), 0.0)
    return (centred.square().sum(dim=1, keepdim=True) / (group.count - degrees_lost).clamp_min(1)).sqrt()


def _deviation_of_others(group: Rewards) -> Tensor:
    """Unbiased, [P, G]: from the sums of all, less each one's own part; 0 where the others are equal."""
    centred = torch.where(group.valid, _from_mean(group), 0.0)
    others = (group.count - 1).clamp_min(1)
    squares = centred.square().sum(dim=1, keepdim=True) - centred.square() - centred.square() / others
    spread = centred.abs().amax(dim=1, keepdim=True)
    squares = torch.where(squares > 1e-12 * spread.square(), squares, 0.0)
    return (squares / (group.count - 2).clamp_min(1)).sqrt()


def _mean(group: Rewards) -> Tensor:
    """0 for a group of one, whose reward says nothing of its prompt."""
    mean = group.values.sum(dim=1, keepdim=True) / group.count.clamp_min(1)
    return torch.where(group.count > 1, mean, 0.0)


SCALES: dict[str, Callable[[Rewards], Tensor]] = {
    "std_unbiased": lambda group: deviation(group, degrees_lost=1),
    "std_population": lambda group: deviation(group, degrees_lost=0),
    "std_leave_one_out": _deviation_of_others,
    "batch": lambda group: deviation(
        Rewards.of(group.values.reshape(1, -1), group.valid.reshape(1, -1)), degrees_lost=1
    ),
    "mean": _mean,
    "nonzero_share": lambda group: (
        (group.values != 0).sum().double() / group.valid.sum().clamp_min(1)
    ).reshape(1, 1),
    "none": lambda group: group.values.new_ones(1, 1),
}
OF_THE_GROUP = frozenset({"std_unbiased", "std_population", "std_leave_one_out", "mean"})
"""Scales of a group by itself, which one alone does not have."""
DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": lambda deviation, epsilon: deviation + epsilon,
    "clamp": lambda deviation, epsilon: deviation.clamp_min(epsilon),
}


WHITENED: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "none": lambda advantage, mask: None,
    "rollouts": lambda advantage, mask: torch.ones_like(advantage),
    "tokens": lambda advantage, mask: (
        mask if advantage.shape == mask.shape else mask.sum(dim=1, keepdim=True)
    ).double(),
}
"""What each advantage weighs in the statistics of the batch; `tokens`: as often as it or its response has tokens."""
WHITENING_DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": DIVISORS["add"],
    "clamp": lambda deviation, epsilon: deviation.clamp_min(math.sqrt(epsilon)),
    "inside": lambda deviation, epsilon: (deviation.square() + epsilon).sqrt(),
}
DEGREES_LOST = {"std_unbiased": 1, "std_population": 0}


def reward_kl(policy: PolicyConfig, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """[N]: what `kl_placement=reward` takes off every response's reward.

    log_prob: the policy that sampled, ref_log_prob, mask: [N, R].
    """
    if policy.kl_placement != "reward":
        return log_prob.new_zeros(log_prob.shape[0])
    per_token = kl_estimate(policy, log_prob, ref_log_prob, mask.bool())
    return policy.kl_coef * per_token.sum(dim=1)
