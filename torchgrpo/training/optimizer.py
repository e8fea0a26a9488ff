"""The optimizer and its learning-rate schedule, from the `optimizer` section.

Every parameter falls into one group by its update rule, its pattern in `group_lr`, and whether it is a matrix, which
weight decay is for: groups stay the same when rates and decay change. Muon takes the matrices inside the network;
AdamW takes embeddings, output head, norms and biases.
"""

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from config.schema.errors import ConfigError
from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.master_weights import MasterWeights, is_half
from torchgrpo.training.sharding import local

Group = dict[str, Any]


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer of all parameters of `model` that require a gradient; bfloat16 ones move as float32.

    Raises:
        ConfigError: nothing to train, or a pattern of `group_lr` that matches no parameter.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise ConfigError("optimizer: the model has no parameter that requires a gradient")
    for pattern in config.group_lr:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                f"optimizer.group_lr[{pattern!r}] matches no parameter; "
                f"they have names such as {next(iter(named))}"
            )
    hidden: set[int] = set()
    if config.name == "muon_adamw":
        outside = {id(parameter) for module in model.modules() for parameter in _outside_parameters(module)}
        hidden = {id(parameter) for parameter in model.parameters() if parameter.ndim == 2} - outside
    groups: dict[tuple[bool, str | None, bool], Group] = {}
    for name, parameter in named.items():
        is_hidden = id(parameter) in hidden
        is_matrix = parameter.ndim >= 2
        matching = next((pattern for pattern in config.group_lr if fnmatchcase(name, pattern)), None)
        rate = config.muon_lr if is_hidden else config.lr
        new = {
            "params": [],
            "lr": rate if matching is None else config.group_lr[matching],
            "weight_decay": config.weight_decay if is_matrix else 0.0,
        }
        groups.setdefault((is_hidden, matching, is_matrix), new)["params"].append(parameter)
    matrices = [group for (is_hidden, *_), group in groups.items() if is_hidden]
    others = [group for (is_hidden, *_), group in groups.items() if not is_hidden]
    members: list[Optimizer] = []
    if others:
        fused = {one.device.type for group in others for one in group["params"]} <= {"cpu", "cuda"}
        members.append(ShardedAdamW(others, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused))
    if matrices:
        members.append(Muon(matrices, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw"))
    optimizer = members[0] if len(members) == 1 else JointOptimizer(members)
    return MasterWeights(optimizer) if any(map(is_half, named.values())) else optimizer


def _outside_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    if isinstance(module, nn.Embedding):
        return module.parameters()
    if isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
        return list(head.parameters())
    return ()


class ShardedAdamW(AdamW):
    """AdamW that updates each rank's own shards as the plain tensors that they are.

    It works element by element, so no rank needs to know of another. As operations on sharded tensors, PyTorch would
    work out at the first step how all of them together are sharded: seconds for a hundred layers.
    """

    def _init_group(self, group: Group, *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex


class JointOptimizer(Optimizer):
    """Several optimizers of disjoint parameters as one: their groups side by side, one step."""

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
    """A factor of every group's peak rate, stepped after each optimizer step. total_steps: of the run."""
    warmup = max(config.warmup_steps, round(config.warmup_fraction * total_steps))
    decay, floor = DECAYS[config.schedule], config.min_lr_fraction

    def factor(step: int) -> float:
        """Of optimizer step `step`, counted from 0."""
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        return floor + (1 - floor) * decay(progress)

    return LambdaLR(optimizer, factor)


def go_to_step(scheduler: LambdaLR, step: int) -> None:
    """The rates of optimizer step `step`, counted from 0, on this schedule."""
    scheduler.last_epoch = step
    for group, factor in zip(scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * factor(step)


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""From the share of the run after the warm-up that is over, to the share of the peak above the floor."""
