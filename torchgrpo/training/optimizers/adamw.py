"""Optimizer `adamw`: AdamW for all parameters."""

from torch import nn
from torch.optim import Optimizer

from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.parameter_groups import make_adamw, parameter_groups


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """Builds AdamW for all trained parameters."""
    return [make_adamw(parameter_groups(model, config, config.lr, lambda parameter: True), config)]
