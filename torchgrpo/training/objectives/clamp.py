"""The objective `clamp`: the clipped product alone."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, binds_always, clipped


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    return -clipped(policy, inputs.ratio) * inputs.advantage


TERM = PolicyTerm(_loss, binds_always)
