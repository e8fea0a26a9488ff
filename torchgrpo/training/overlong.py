"""Responses that are long or cut off: the punishment of their rewards, and whether the loss reads them at all.

DAPO (arXiv 2503.14476) calls them soft overlong punishment and overlong filtering.
"""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig


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
