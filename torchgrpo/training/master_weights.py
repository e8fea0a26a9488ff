"""Optimizer wrapper that updates bfloat16 parameters exactly as float32, by keeping the dropped bits.

    weight bfloat16 + remainder int16 ──join──▶ float32 ──inner optimizer──▶ float32 ──split──▶ weight + remainder

A bfloat16 weight cannot change by less than about 1/256 of itself: at the learning rates of reinforcement
learning most updates would be rounded away. So the 16 bits that rounding drops are kept, in two bytes per
parameter. Weight and remainder together are a float32 number, which exists only during the optimizer step.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchgrpo.training.optimizer_offload import swap_storage
from torchgrpo.training.sharding import local_shard

BUCKET_ELEMENTS = 1 << 29
"""Parameters that exist in float32 at one time; a larger tensor is a bucket of its own."""
CPU_BUCKET_ELEMENTS = 1 << 22
"""Bucket size where all parameters are in host memory: a small bucket reuses its memory pages."""
_ALIGNMENT = 64
"""Elements to whose multiples tensors of a bucket are aligned, for vector instructions."""


def join(weights: list[Tensor], remainders: list[Tensor]) -> Tensor:
    """Returns float32 numbers from `weights` (bfloat16) and `remainders` (int16), as one tensor.

    `bucket_views` returns the float32 tensor of each weight.
    """
    starts = _bucket_starts(weights)
    masters = torch.empty(starts[-1], dtype=torch.float32, device=weights[0].device)
    lower = torch.empty_like(masters, dtype=torch.int16)
    torch._foreach_copy_(bucket_views(masters, weights), weights)
    torch._foreach_copy_(bucket_views(lower, weights), remainders)
    masters.view(torch.int32).add_(lower)
    return masters


def split(masters: Tensor, weights: list[Tensor], remainders: list[Tensor]) -> None:
    """Writes the bfloat16 numbers nearest to `masters`, and the int16 differences of their bits.

    The inverse of `join`; overwrites `masters`. Ties round away from zero, not to even, since int16 has no
    +32768.
    """
    bits = masters.view(torch.int32)
    lower = bits.to(torch.int16)  # the lower half of the bits, which is the difference to the nearest number
    bits.add_(lower == -(1 << 15))  # a tie becomes a larger number, which rounds up
    torch._foreach_copy_(remainders, bucket_views(lower, weights))
    torch._foreach_copy_(weights, bucket_views(masters, weights))


def bucket_views(bucket: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the part of a flat `bucket` for each tensor of `like`, in its shape."""
    starts = _bucket_starts(like)
    return [bucket[start : start + one.numel()].view(one.shape) for start, one in zip(starts, like, strict=False)]


def _bucket_starts(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the first element of each tensor in a bucket, and the bucket's size."""
    sizes = (-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    return list(accumulate(sizes, initial=0))


class MasterWeights(Optimizer):
    """An optimizer that updates bfloat16 parameters exactly as float32 ones.

    Its `param_groups` hold the model's parameters, so clipping, scaling and schedules work on these. `inner`
    works on float32 shadows of the parameters, which are empty between steps; its states are float32, and so are
    the gradients of the parameters, from now on. Parameters of other dtypes go to `inner` as they are.

    Args:
        inner: has not stepped yet; it updates each parameter by itself, and skips parameters without a
            gradient.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        groups = [{**group, "params": list(group["params"])} for group in inner.param_groups]
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        on_host = all(parameter.device.type == "cpu" for parameter in self.parameters)
        self.bucket_elements = CPU_BUCKET_ELEMENTS if on_host else BUCKET_ELEMENTS
        half_parameters = [parameter for parameter in self.parameters if is_half(parameter)]
        for parameter in half_parameters:
            parameter.grad_dtype = torch.float32  # microbatches are summed in this dtype
        self.shadows = {parameter: _empty_shadow(parameter) for parameter in half_parameters}
        self.remainders = {parameter: torch.zeros_like(parameter, dtype=torch.int16) for parameter in half_parameters}
        for group in inner.param_groups:
            group["params"] = [self.shadows.get(parameter, parameter) for parameter in group["params"]]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every bucket of parameters by one step of `inner`. Takes no closure."""
        if closure is not None:
            raise ValueError("MasterWeights.step takes no closure: every bucket would run it again")
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs |= {key: value for key, value in ours.items() if key != "params"}
        others = {parameter: parameter.grad for parameter in self.parameters if parameter not in self.shadows}
        if others:
            self.inner.step()
        for parameter in others:
            parameter.grad = None
        for bucket in self._buckets():
            self._step_bucket(bucket)
        for parameter, gradient in others.items():
            parameter.grad = gradient

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Yields half-precision parameters with gradients, at most `bucket_elements` at a time."""
        bucket: list[nn.Parameter] = []
        for parameter in self.shadows:
            if parameter.grad is None:
                continue
            elements = sum(local_shard(each.data).numel() for each in (*bucket, parameter))
            if bucket and elements > self.bucket_elements:
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket

    def _step_bucket(self, bucket: Sequence[nn.Parameter]) -> None:
        """Updates one bucket through its float32 shadows."""
        weights = [local_shard(parameter.data) for parameter in bucket]
        remainders = [local_shard(self.remainders[parameter]) for parameter in bucket]
        masters = join(weights, remainders)
        for parameter, master in zip(bucket, bucket_views(masters, weights), strict=True):
            shadow = self.shadows[parameter]
            swap_storage(shadow, master)
            shadow.grad = parameter.grad
        self.inner.step()
        for parameter in bucket:
            shadow = self.shadows[parameter]
            shadow.grad = None
            swap_storage(shadow, _empty_tensor(parameter))
        split(masters, weights, remainders)


def is_half(parameter: Tensor) -> bool:
    """Whether a parameter is bfloat16."""
    return parameter.dtype == torch.bfloat16


def _empty_shadow(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a float32 parameter without elements, sharded as `parameter` is."""
    like = parameter.data
    if not isinstance(like, DTensor):
        return nn.Parameter(_empty_tensor(parameter))
    empty, shape, stride = _empty_tensor(parameter), like.shape, like.stride()
    return nn.Parameter(DTensor.from_local(empty, like.device_mesh, like.placements, shape=shape, stride=stride))


def _empty_tensor(parameter: nn.Parameter) -> Tensor:
    """Returns an empty float32 tensor with as many dimensions as `parameter`."""
    return local_shard(parameter.data).new_empty([0] * parameter.ndim, dtype=torch.float32)
