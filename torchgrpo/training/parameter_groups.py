"""Parameter groups of the optimizers: by update rule, pattern of `optimizer.group_lr`, and whether decay applies.

Groups stay the same when rates and decay change, so a checkpoint fits.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.sharding import local

Group = dict[str, Any]


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, lr: float, belongs: Callable[[nn.Parameter], bool]
) -> list[Group]:
    """Groups of the trained parameters for which `belongs` holds. lr: theirs, where no pattern gives another."""
    groups: dict[tuple[str | None, bool], Group] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not belongs(parameter):
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


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the matrices between embedding and head."""
    outside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outside |= {id(parameter) for parameter in module.parameters()}
        elif isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
            outside |= {id(parameter) for parameter in head.parameters()}
    return {id(parameter) for parameter in model.parameters() if parameter.ndim == 2} - outside


def adamw(groups: list[Group], config: OptimizerConfig) -> AdamW:
    fused = {one.device.type for group in groups for one in group["params"]} <= {"cpu", "cuda"}
    return ShardedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


@runtime_checkable
class Resumable(Protocol):
    """An optimizer whose state can be made before its first step, as a resumed run needs it."""

    def first_state(self, zeros: Tensor, group: Group) -> dict[str, Tensor]:
        """State of a parameter that has taken no step. zeros: of its shape, placement and dtype."""
        ...


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

    def first_state(self, zeros: Tensor, group: Group) -> dict[str, Tensor]:
        device = zeros.device if group["fused"] else torch.device("cpu")
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
