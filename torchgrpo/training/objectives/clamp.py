"""Policy term `clamp`: clipped ratio times advantage, without the minimum of PPO."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, clip_binds_either_sign, clip_ratio


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the loss of each token, [N, R]."""
    return -clip_ratio(policy, inputs.ratio) * inputs.advantage


TERM = PolicyTerm(_loss, clip_binds_either_sign)
