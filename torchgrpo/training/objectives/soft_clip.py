"""The objective `soft_clip`: a sigmoid gate in place of the clip (SAPO)."""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, binds_never, either


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    first, second = policy.soft_clip_temperature_positive, policy.soft_clip_temperature_negative
    temperature = either(inputs.advantage > 0, first, second, inputs.ratio)
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    return -gate * inputs.advantage


TERM = PolicyTerm(_loss, binds_never)
