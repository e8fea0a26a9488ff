"""Optimizer `muon_adamw`: Muon for the matrices between embedding and head, AdamW for the rest."""

from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.parameter_groups import ParameterGroup, hidden_matrix_ids, make_adamw, parameter_groups


class ResumableMuon(Muon):
    """Muon whose momentum can be created before the first step, for checkpoints."""

    def initial_state(self, zeros: Tensor, group: ParameterGroup) -> dict[str, Tensor]:
        """Returns the momentum of a parameter before its first step."""
        return {"momentum_buffer": zeros}


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """Builds Muon for hidden matrices and AdamW for the other trained parameters."""
    hidden = hidden_matrix_ids(model)
    matrices = parameter_groups(model, config, config.muon_lr, lambda one: id(one) in hidden)
    others = parameter_groups(model, config, config.lr, lambda one: id(one) not in hidden)
    members: list[Optimizer] = [make_adamw(others, config)] if others else []
    if matrices:
        members.append(ResumableMuon(matrices, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw"))
    return members
