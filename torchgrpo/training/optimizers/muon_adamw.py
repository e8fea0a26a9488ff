"""The optimizer `muon_adamw`: Muon for the matrices between embedding and head, AdamW for the rest."""

from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.parameter_groups import Group, adamw, hidden_matrices, parameter_groups


class ResumableMuon(Muon):
    """Muon whose momentum a checkpoint can hold before the first step."""

    def first_state(self, zeros: Tensor, group: Group) -> dict[str, Tensor]:
        return {"momentum_buffer": zeros}


def make_members(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    hidden = hidden_matrices(model)
    matrices = parameter_groups(model, config, config.muon_lr, lambda one: id(one) in hidden)
    others = parameter_groups(model, config, config.lr, lambda one: id(one) not in hidden)
    members: list[Optimizer] = [adamw(others, config)] if others else []
    if matrices:
        members.append(ResumableMuon(matrices, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw"))
    return members
