"""Length penalty and loss filter for overlong or truncated completions.

These are the soft overlong punishment and the overlong filtering of DAPO (arXiv 2503.14476).
"""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig


def overlong_reward(policy: PolicyConfig, rewards: Tensor, lengths: Tensor, max_tokens: int) -> Tensor:
    """Subtracts the soft overlong punishment from rewards (DAPO, arXiv 2503.14476, equation 13).

    rewards: [N]. lengths: [N], response lengths in tokens. Within `overlong_cache` tokens of `max_tokens` the
    punishment grows linearly to `overlong_penalty`; at `max_tokens` the `overlong_rule` decides.
    """
    if policy.overlong_cache is None:
        return rewards
    width = min(policy.overlong_cache, int(max_tokens * policy.overlong_fraction))
    over = (lengths - (max_tokens - width)).to(rewards.dtype)
    penalized_rewards = rewards - policy.overlong_penalty * (over / max(width, 1)).clamp(0.0, 1.0)
    if policy.overlong_rule == "zero_at_limit":
        return torch.where(lengths >= max_tokens, 0.0, penalized_rewards)
    return penalized_rewards


def rows_in_loss(policy: PolicyConfig, lengths: Tensor, has_stopped: Tensor, max_tokens: int) -> Tensor:
    """Returns a mask [N] of responses that enter the loss.

    lengths: [N], in tokens. has_stopped: bool [N], whether the model itself ended the response.
    """
    if not policy.filter_truncated:
        return torch.ones_like(has_stopped, dtype=torch.bool)
    if policy.treat_max_len_as_truncated:
        return has_stopped & (lengths < max_tokens)
    return has_stopped.bool()
