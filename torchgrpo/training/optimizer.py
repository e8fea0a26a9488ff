"""Builds the optimizer and its learning-rate schedule from the `optimizer` section.

`optimizers/NAME.py` builds the optimizers of `optimizer.name=NAME`, one for each update rule.
"""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from config.schema.errors import ConfigError
from config.schema.optimizer import OPTIMIZERS, OptimizerConfig
from torchgrpo.training.master_weights import MasterWeights, is_half


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Builds the optimizer of all parameters of `model` that require a gradient.

    bfloat16 parameters are updated through float32 master weights.

    Raises:
        ConfigError: there is nothing to train, or a pattern of `group_lr` matches no parameter.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise ConfigError("optimizer: the model has no parameter that requires a gradient")
    for pattern in config.group_lr:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                f"optimizer.group_lr[{pattern!r}] matches no parameter; they have names such as {next(iter(named))}"
            )
    members: list[Optimizer] = OPTIMIZERS.load(config.name)(model, config)
    optimizer = members[0] if len(members) == 1 else JointOptimizer(members)
    return MasterWeights(optimizer) if any(map(is_half, named.values())) else optimizer


class JointOptimizer(Optimizer):
    """Several optimizers of disjoint parameters as a single optimizer."""

    def __init__(self, members: list[Optimizer]) -> None:
        self.members = members
        super().__init__([group for member in members for group in member.param_groups], {})
        self.param_groups = [group for member in members for group in member.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("JointOptimizer.step takes no closure: every member would run it again")
        for member in self.members:
            member.step()


def make_scheduler(optimizer: Optimizer, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    """Builds the learning-rate schedule, a factor of each group's peak rate per optimizer step.

    total_steps: optimizer steps of the run.
    """
    warmup = max(config.warmup_steps, round(config.warmup_fraction * total_steps))
    decay, floor = DECAYS[config.schedule], config.min_lr_fraction

    def factor(step: int) -> float:
        """Returns the factor of optimizer step `step`, counted from 0."""
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        return floor + (1 - floor) * decay(progress)

    return LambdaLR(optimizer, factor)


def set_schedule_step(scheduler: LambdaLR, step: int) -> None:
    """Sets the learning rates of optimizer step `step`, counted from 0."""
    scheduler.last_epoch = step
    for group, factor in zip(scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * factor(step)


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Decay functions: progress after the warm-up (0 to 1) to the share of the peak rate above the floor."""
