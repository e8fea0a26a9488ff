"""Policy term `geometric`: advantage times the geometric mean of log-space-clipped token ratios (GMPO)."""

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs, episode_mean
from torchgrpo.training.policy_terms import ClipMasks, PolicyTerm


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the loss of each token, [N, R]."""
    sign = inputs.advantage.sign()
    log_ratio = inputs.log_ratio
    clipped = log_ratio.clamp(-policy.clip_epsilon_low, policy.clip_epsilon_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = episode_mean(pessimistic, inputs.mask, inputs.episodes, policy.length_epsilon).exp()
    advantage = episode_mean(inputs.advantage, inputs.mask, inputs.episodes, policy.length_epsilon)
    return (-ratio * advantage).expand_as(log_ratio)


def _clip_binds_in_log_space(policy: PolicyConfig, inputs: LossInputs) -> ClipMasks:
    """Returns the clip masks of the log-ratio, in the direction of the advantage."""
    low = inputs.log_ratio < -policy.clip_epsilon_low
    high = inputs.log_ratio > policy.clip_epsilon_high
    return low & (inputs.advantage < 0), high & (inputs.advantage > 0)


TERM = PolicyTerm(_loss, _clip_binds_in_log_space)
