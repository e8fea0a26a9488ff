"""The optimizer `adamw`: AdamW for every parameter."""

from torch import nn
from torch.optim import Optimizer

from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.parameter_groups import adamw, parameter_groups


def make_members(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    return [adamw(parameter_groups(model, config, config.lr, lambda parameter: True), config)]
