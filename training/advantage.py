"""Rewards to advantages, one group at a time; which groups and responses are trained on at all.

Everything here is small, exact and outside the graph: statistics in float64, no gradient. Shapes: P groups of
G members ([P, G]) or N = P * G responses ([N]).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from config.policy import PolicyConfig
from training.kl import kl_estimate


def group_advantage(policy: PolicyConfig, rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """Advantage of every member of every group.

    rewards: [P, G], any dtype. valid: [P, G] bool. Members that are not valid, and members whose reward is
    not finite, take no part in any statistic and get 0. Returns [P, G] float64, finite everywhere.

    Defined edges: valid rewards that are all equal give exactly 0 (with `baseline=none` and `scale=none` they
    stay as they are); a group with one valid member follows `group_of_one`; one with none gets 0.
    """
    rewards = rewards.double()
    if rewards.numel() == 0:
        return rewards
    valid = rewards.isfinite() if valid is None else valid.bool() & rewards.isfinite()
    rewards = torch.where(valid, rewards, 0.0)
    count = valid.sum(dim=1, keepdim=True)
    relative = _relative(rewards, valid)
    centred = BASELINES[policy.baseline](rewards, relative, count)
    deviation = SCALES[policy.scale](rewards, relative, valid)
    if policy.group_of_one == "raw":
        centred = torch.where(count == 1, rewards, centred)
        if policy.scale in ("std_unbiased", "std_population"):
            deviation = torch.where(count == 1, 1.0, deviation)
    divisor = DIVISORS[policy.epsilon_rule](deviation, policy.epsilon if policy.scale != "none" else 0.0)
    return torch.where(valid & (deviation > 0), centred / divisor, 0.0)


def _relative(rewards: Tensor, valid: Tensor) -> Tensor:
    """Differences from a row's first valid reward: exact zeros for equal rewards, and no digits lost to a
    large common offset (1e8 and 1e8 + 1)."""
    first = rewards.gather(1, valid.int().argmax(dim=1, keepdim=True))
    return torch.where(valid, rewards - first, 0.0)


def _from_mean(rewards: Tensor, relative: Tensor, count: Tensor) -> Tensor:
    return relative - relative.sum(dim=1, keepdim=True) / count.clamp_min(1)


def _from_mean_of_others(rewards: Tensor, relative: Tensor, count: Tensor) -> Tensor:
    return _from_mean(rewards, relative, count) * count / (count - 1).clamp_min(1)


BASELINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": _from_mean,
    "leave_one_out": _from_mean_of_others,
    "none": lambda rewards, relative, count: rewards,
}


def _deviation(relative: Tensor, valid: Tensor, degrees_lost: int) -> Tensor:
    count = valid.sum(dim=1, keepdim=True)
    centred = torch.where(valid, _from_mean(relative, relative, count), 0.0)
    return (centred.square().sum(dim=1, keepdim=True) / (count - degrees_lost).clamp_min(1)).sqrt()


def _batch_deviation(rewards: Tensor, valid: Tensor) -> Tensor:
    flat, kept = rewards.reshape(1, -1), valid.reshape(1, -1)
    return _deviation(_relative(flat, kept), kept, degrees_lost=1)


SCALES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "std_unbiased": lambda rewards, relative, valid: _deviation(relative, valid, degrees_lost=1),
    "std_population": lambda rewards, relative, valid: _deviation(relative, valid, degrees_lost=0),
    "batch": lambda rewards, relative, valid: _batch_deviation(rewards, valid),
    "none": lambda rewards, relative, valid: rewards.new_ones(1, 1),
}
DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": lambda deviation, epsilon: deviation + epsilon,
    "clamp": lambda deviation, epsilon: deviation.clamp_min(epsilon),
}


def overlong_reward(policy: PolicyConfig, rewards: Tensor, lengths: Tensor, max_tokens: int) -> Tensor:
    """Rewards after the soft overlong punishment (DAPO, arXiv 2503.14476, equation 13).

    rewards: [N]. lengths: [N] response lengths in tokens. Within `overlong_cache` tokens of `max_tokens` the
    punishment grows linearly to `overlong_penalty`; at `max_tokens` the `overlong_rule` decides.
    """
    if policy.overlong_cache is None:
        return rewards
    width = min(policy.overlong_cache, int(max_tokens * policy.overlong_fraction))
    over = (lengths - (max_tokens - width)).to(rewards.dtype)
    punished = rewards - policy.overlong_penalty * (over / max(width, 1)).clamp(0.0, 1.0)
    if policy.overlong_rule == "zero_at_limit":
        return torch.where(lengths >= max_tokens, 0.0, punished)
    return punished


def rows_in_loss(policy: PolicyConfig, lengths: Tensor, stopped: Tensor, max_tokens: int) -> Tensor:
    """[N] bool: the responses that the loss reads.

    lengths: [N] tokens. stopped: [N] bool, the model ended the response by itself.
    """
    if not policy.filter_truncated:
        return torch.ones_like(stopped, dtype=torch.bool)
    if policy.limit_is_truncated:
        return stopped & (lengths < max_tokens)
    return stopped.bool()


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


def _success_rate(rewards: Tensor, success: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, success, 0.0).sum(dim=1) / valid.sum(dim=1).clamp_min(1)


def _reward_deviation(rewards: Tensor, success: Tensor, valid: Tensor) -> Tensor:
    return _deviation(_relative(rewards, valid), valid, degrees_lost=0).squeeze(1)


FILTER_STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "success": _success_rate,
    "reward_std": _reward_deviation,
}


def reward_kl(policy: PolicyConfig, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """[N]: what `kl_placement=reward` takes off every response's reward.

    log_prob: the policy that sampled, ref_log_prob, mask: [N, R].
    """
    if policy.kl_placement != "reward":
        return log_prob.new_zeros(log_prob.shape[0])
    per_token = kl_estimate(policy, log_prob, ref_log_prob, mask.bool())
    return policy.kl_coef * per_token.sum(dim=1)
