"""The objective `cispo`: the clipped ratio without gradient, times log-prob (arXiv:2506.13585)."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.policy_terms import PolicyTerm, binds_always, clipped


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    return -clipped(policy, inputs.ratio).detach() * inputs.advantage * inputs.log_prob


TERM = PolicyTerm(_loss, binds_always)
