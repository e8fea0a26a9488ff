"""A model whose parameters are shared out between learner ranks: PyTorch's FSDP2 (`fully_shard`).

    rank 0: full tensors ──broadcast──▶ every rank: its shard of each parameter, float32 or bfloat16
    forward and backward of a layer: all-gather its parameters, compute, free them; reduce-scatter its gradients

Everything computes inside the root's forward, since that is where FSDP2 has embedding, last norm and head together.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from torchgrpo.training.adapters import causal_model

T = TypeVar("T")


class Within(Protocol):
    """Runs a computation where the parameters of a model are whole, and returns what it returns."""

    def __call__(self, compute: Callable[[], T]) -> T: ...


def directly(compute: Callable[[], T]) -> T:
    """Of a model in one piece, whose parameters always are."""
    return compute()


class Sharded(nn.Module):
    """The root over a sharded model, wrapped by peft or not: `root(compute)` is what `compute()` returns.

    Inside `compute` the model's parameters are whole; outside they are shards.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()

    def __call__(self, compute: Callable[[], T]) -> T:
        result: T = super().__call__(compute)
        if isinstance(self, FSDPModule) and not torch.is_grad_enabled():
            self.reshard()  # FSDP2 leaves the root's own parameters whole for a backward pass, which will not come
        return result


def learner_mesh(device: str, ranks: int, shard_size: int) -> DeviceMesh:
    """All ranks in one dimension, or groups of `shard_size` of them that hold the same shards in a second one (HSDP).

    device: `cpu` or `cuda`.
    """
    if shard_size == ranks:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (ranks // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None, offload: bool = False
) -> Sharded:
    """`model` in shards over `mesh`, each decoder layer a unit, under its root.

    Gradients are summed over the ranks, in float32, for the loss is divided by the global batch. compute_dtype: that
    layers are gathered and computed in; None: the weights' own. offload: shards,
    gradients and what the optimizer makes of them are in host memory, from which a layer is gathered.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    root = Sharded(model)
    for unit in (*decoder_layers(model), root):
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=place)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
            module.set_gradient_divide_factor(1.0)
    return root


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The blocks of a decoder, each of which is gathered and freed as one."""
    layers = causal_model(model).base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def fill(model: nn.Module, full: nn.Module | None) -> None:
    """Give every rank its shards and buffers of `full`, which rank 0 alone has.

    model: sharded, its tensors already on their device, of any values.
    """
    source = {} if full is None else dict(_tensors(full))
    for name, tensor in _tensors(model):
        whole = source.get(name)
        if isinstance(tensor, DTensor):
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if whole is not None:
                values.copy_(whole)
            tensor.copy_(distribute_tensor(values, tensor.device_mesh, tensor.placements))
        else:
            if whole is not None:
                tensor.copy_(whole)
            dist.broadcast(tensor, 0)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, those that no checkpoint holds included."""
    return [(name, p.detach()) for name, p in model.named_parameters()] + list(model.named_buffers())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of shards, on every rank at once; another tensor is itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, or another tensor itself; memory is shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all of them together, float32 (float64 of float64), on every rank the same.

    Each rank takes that of its own shards, so that one number crosses. As operations on sharded tensors, PyTorch would
    first work out how all of them together are sharded: seconds for a hundred layers.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    own = torch._foreach_norm([local(tensor) for tensor in tensors], dtype=dtype)
    square = torch.stack(own).double().square().sum()
    if isinstance(tensors[0], DTensor):
        mesh = tensors[0].device_mesh
        for dimension, placement in enumerate(tensors[0].placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(dimension))
    return square.sqrt().to(dtype)
