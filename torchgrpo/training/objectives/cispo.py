"""Policy term `cispo`: clipped ratio without gradient, times advantage and log-prob (arXiv:2506.13585)."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, clip_binds_either_sign, clip_ratio


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the loss of each token, [N, R]."""
    return -clip_ratio(policy, inputs.ratio).detach() * inputs.advantage * inputs.log_prob


TERM = PolicyTerm(_loss, clip_binds_either_sign)
