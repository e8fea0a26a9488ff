"""The objective `none`: ratio times advantage without a clip, or log-prob times advantage."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, binds_never


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    return -(inputs.log_prob if policy.ratio == "none" else inputs.ratio) * inputs.advantage


TERM = PolicyTerm(_loss, binds_never)
