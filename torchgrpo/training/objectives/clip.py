"""The objective `clip`: the smaller of the unclipped and the clipped product (PPO, arXiv:1707.06347)."""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, binds_by_sign, clipped


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    advantage = inputs.advantage
    ratio = inputs.ratio if policy.ratio_max is None else inputs.ratio.clamp(max=policy.ratio_max)
    loss = -torch.minimum(ratio * advantage, clipped(policy, inputs.ratio) * advantage)
    if policy.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -policy.dual_clip * advantage), loss)


TERM = PolicyTerm(_loss, binds_by_sign)
