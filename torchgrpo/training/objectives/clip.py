"""Policy term `clip`: smaller product of advantage with clipped or unclipped ratio (PPO, arXiv:1707.06347)."""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, clip_binds_by_sign, clip_ratio


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the loss of each token, [N, R]."""
    advantage = inputs.advantage
    ratio = inputs.ratio if policy.ratio_max is None else inputs.ratio.clamp(max=policy.ratio_max)
    loss = -torch.minimum(ratio * advantage, clip_ratio(policy, inputs.ratio) * advantage)
    if policy.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -policy.dual_clip * advantage), loss)


TERM = PolicyTerm(_loss, clip_binds_by_sign)
