"""Parameter groups of the optimizers, and AdamW for sharded parameters.

Groups follow from update rule, pattern of `optimizer.group_lr`, and whether weight decay applies. They do not
depend on the values of learning rates and decay, so a checkpoint fits after these change.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.sharding import local_shard

ParameterGroup = dict[str, Any]


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, lr: float, is_member: Callable[[nn.Parameter], bool]
) -> list[ParameterGroup]:
    """Builds the groups of trained parameters for which `is_member` holds.

    lr: learning rate of parameters that match no pattern of `optimizer.group_lr`.
    """
    groups: dict[tuple[str | None, bool], ParameterGroup] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not is_member(parameter):
            continue
        is_matrix = parameter.ndim >= 2
        matching = next((pattern for pattern in config.group_lr if fnmatchcase(name, pattern)), None)
        new = {
            "params": [],
            "lr": lr if matching is None else config.group_lr[matching],
            "weight_decay": config.weight_decay if is_matrix else 0.0,
        }
        groups.setdefault((matching, is_matrix), new)["params"].append(parameter)
    return list(groups.values())


def hidden_matrix_ids(model: nn.Module) -> set[int]:
    """Returns `id()` of each matrix between embedding and output head."""
    outside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outside |= {id(parameter) for parameter in module.parameters()}
        elif isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
            outside |= {id(parameter) for parameter in head.parameters()}
    return {id(parameter) for parameter in model.parameters() if parameter.ndim == 2} - outside


def make_adamw(groups: list[ParameterGroup], config: OptimizerConfig) -> AdamW:
    """Builds AdamW, fused if all parameters are on devices with a fused kernel."""
    fused = {one.device.type for group in groups for one in group["params"]} <= {"cpu", "cuda"}
    return ShardedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


@runtime_checkable
class ResumableOptimizer(Protocol):
    """Optimizer that can create its state before its first step, as a resumed run needs."""

    def initial_state(self, zeros: Tensor, group: ParameterGroup) -> dict[str, Tensor]:
        """Returns the state of a parameter before its first step.

        zeros: tensor of zeros with the shape, placement and dtype of the parameter.
        """
        ...


class ShardedAdamW(AdamW):
    """AdamW that updates each rank's shards as plain tensors.

    AdamW works element by element, so ranks are independent. With sharded tensors PyTorch would derive the
    sharding of all operands at the first step, which is slow for many layers.
    """

    def _init_group(self, group: ParameterGroup, *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local_shard(tensor) for tensor in tensors]
        return has_complex

    def initial_state(self, zeros: Tensor, group: ParameterGroup) -> dict[str, Tensor]:
        device = zeros.device if group["fused"] else torch.device("cpu")
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
