"""What the rewards say of a batch, for whoever chooses by it."""

import torch
from tensordict import TensorDictBase

from envs.token_env import OUTCOMES


def success(scored: TensorDictBase) -> torch.Tensor:
    """[N] float64: the reward's `accuracy` part (0 to 1), or 1 for a reward of at least 1 where it has none."""
    accuracy = scored["next", "reward_parts"].get("accuracy", None)
    right = scored["next", "reward"] >= 1 if accuracy is None else accuracy
    return right[:, 0].double()


def judged(scored: TensorDictBase) -> torch.Tensor:
    """[N] bool: false where judging failed, so that the reward says nothing about the completion."""
    return scored["next", "reward_status"][:, 0] != OUTCOMES.index("error")
