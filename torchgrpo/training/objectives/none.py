"""Policy term `none`: ratio or log-prob times advantage, without a clip."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, clip_binds_nowhere


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the loss of each token, [N, R]."""
    return -(inputs.log_prob if policy.ratio == "none" else inputs.ratio) * inputs.advantage


TERM = PolicyTerm(_loss, clip_binds_nowhere)
