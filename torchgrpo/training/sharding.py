"""Shards a model over ranks with FSDP2, gathers its tensors, and computes norms over shards.

    files, or full tensors of rank 0 ──▶ every rank: its shard of each parameter, float32 or bfloat16
    a layer's forward and backward: all-gather its parameters, compute, free them; reduce-scatter gradients

Every computation runs inside the root's forward, because FSDP2 gathers embedding, last norm and head together
there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from torchgrpo.training.adapters import causal_model

T = TypeVar("T")


class UnshardedContext(Protocol):
    """Runs a computation while a model's full parameters are gathered, and returns its result."""

    def __call__(self, compute: Callable[[], T]) -> T: ...


def no_sharding(compute: Callable[[], T]) -> T:
    """Runs a computation on a model that is not sharded."""
    return compute()


@dataclass(frozen=True)
class GatherSchedule:
    """Times at which the ranks gather and free a layer.

    prefetch_layers: layers that are gathered ahead of the one that computes. reshard_after_forward: a layer is
    freed after its forward pass and gathered again for its backward pass.
    """

    prefetch_layers: int = 1
    reshard_after_forward: bool = True


DEFAULT_SCHEDULE = GatherSchedule()


class ShardedModel(nn.Module):
    """The FSDP2 root over a model, wrapped by peft or not: `root(compute)` returns `compute()`.

    Inside `compute` the parameters are full tensors; outside they are shards.

    kept_layers: layers that stay gathered from a forward pass with gradients to the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.kept_layers: list[FSDPModule] = []

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()

    def __call__(self, compute: Callable[[], T]) -> T:
        for layer in self.kept_layers:
            layer.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
        result: T = super().__call__(compute)
        if isinstance(self, FSDPModule) and not torch.is_grad_enabled():
            self.reshard()  # FSDP2 keeps the root's own parameters gathered for a backward pass; here none follows
        return result


def learner_mesh(device: str, ranks: int, shard_size: int) -> DeviceMesh:
    """Builds the device mesh of the ranks: one dimension, or two for hybrid sharding (HSDP).

    With `shard_size` below `ranks`, groups of `shard_size` ranks hold one copy of the shards each. device:
    `cpu` or `cuda`.
    """
    if shard_size == ranks:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (ranks // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    offload: bool = False,
    schedule: GatherSchedule = DEFAULT_SCHEDULE,
) -> ShardedModel:
    """Shards a model over `mesh`, each decoder layer a unit, and returns its root.

    Gradients are summed over the ranks in float32, since the loss is divided by the global batch; see also
    `keep_float32_gradients`.

    compute_dtype: dtype in which layers are gathered and computed; None: the dtype of the weights. offload:
    shards, gradients and optimizer states are in host memory, from which a layer is gathered. schedule: times at
    which layers are gathered and freed.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    root = ShardedModel(model)
    units = [
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=policy)
        for unit in (*decoder_layers(model), root)
    ]
    _set_schedule(root, units[:-1], schedule)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
            module.set_gradient_divide_factor(1.0)
    return root


def _set_schedule(root: ShardedModel, layers: Sequence[FSDPModule], schedule: GatherSchedule) -> None:
    """Applies a schedule to the layers; FSDP2 by itself gathers one ahead."""
    if not schedule.reshard_after_forward:
        root.kept_layers = list(layers)
    if schedule.prefetch_layers == 1:
        return
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[index + 1 : index + 1 + schedule.prefetch_layers]))
        layer.set_modules_to_backward_prefetch(list(layers[max(0, index - schedule.prefetch_layers) : index][::-1]))


def keep_float32_gradients(root: ShardedModel) -> None:
    """Lets shards in bfloat16 have float32 gradients, as the sum over the ranks returns them.

    FSDP2 would round each sum to the dtype of the shards, and has no setting for another dtype. It sets the dtype at
    the first pass, so this call comes later.
    """
    for module in root.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            group._orig_dtype = None


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Returns the blocks of a decoder, each of which is gathered and freed as one."""
    layers = causal_model(model).base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def distribute_weights(model: nn.Module, full: nn.Module | None, name_part: str = "") -> None:
    """Sends every rank its shards and buffers of `full`, which rank 0 alone has.

    model: the sharded model; its tensors are already on their device, with any values. name_part: tensors without it
    in their name are left out.
    """
    source = {} if full is None else dict(_tensors(full))
    for name, tensor in _tensors(model):
        if name_part not in name:
            continue
        weight = source.get(name)
        if isinstance(tensor, DTensor):
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if weight is not None:
                values.copy_(weight)
            tensor.copy_(distribute_tensor(values, tensor.device_mesh, tensor.placements))
        else:
            if weight is not None:
                tensor.copy_(weight)
            dist.broadcast(tensor, 0)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns parameters and buffers, including buffers that no checkpoint holds."""
    return [(name, p.detach()) for name, p in model.named_parameters()] + list(model.named_buffers())


def full_tensor(tensor: Tensor) -> Tensor:
    """Gathers the full tensor of a DTensor's shards on every rank at once.

    Returns any other tensor itself.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or any other tensor itself; memory is shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compute_device(parameter: Tensor) -> torch.device:
    """Returns the device on which a model computes with a parameter.

    The shards of the parameter may be in host memory.
    """
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norm of all tensors together, the same on every rank.

    float32, or float64 for float64 tensors. Each rank takes the norm of its own shards, so that a single
    number is exchanged. With operations on DTensors, PyTorch would first propagate the sharding of all
    tensors, which is slow.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    own = torch._foreach_norm([local_shard(tensor) for tensor in tensors], dtype=dtype)
    square = torch.stack(own).double().square().sum()
    if isinstance(tensors[0], DTensor):
        mesh = tensors[0].device_mesh
        for dimension, placement in enumerate(tensors[0].placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(dimension))
    return square.sqrt().to(dtype)
