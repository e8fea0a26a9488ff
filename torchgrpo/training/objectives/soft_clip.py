"""Policy term `soft_clip`: advantage times a sigmoid gate of the ratio (SAPO)."""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, clip_binds_nowhere, scalar_where


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the loss of each token, [N, R]."""
    first, second = policy.soft_clip_temperature_positive, policy.soft_clip_temperature_negative
    temperature = scalar_where(inputs.advantage > 0, first, second, inputs.ratio)
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    return -gate * inputs.advantage


TERM = PolicyTerm(_loss, clip_binds_nowhere)
