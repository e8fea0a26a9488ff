"""Half-precision parameters that an optimizer moves as if they were float32.

    weight bfloat16 + remainder int16 ──join──▶ float32 ──inner optimizer──▶ float32 ──split──▶ weight + remainder

A bfloat16 weight cannot be moved by less than about 1/256 of itself: at the learning rates of reinforcement learning
most updates would be rounded away. The 16 bits that rounding drops are kept instead, two bytes a parameter. Weight
and remainder together are a float32 number, which exists only while the optimizer works on it.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchgrpo.training.host_states import hold
from torchgrpo.training.sharding import local

BUCKET_ELEMENTS = 1 << 26
"""Parameters that exist in float32 at one time; a larger one is alone. About ten bytes each, for the step only."""
CPU_BUCKET_ELEMENTS = 1 << 22
"""The same where all parameters are the host's: what stays small takes no new pages, which cost more than the step."""


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 number whose upper half is nearest to `weight` (bfloat16) and that `split` gave `remainder` for."""
    master = weight.to(torch.float32)
    master.view(torch.int32).add_(remainder)
    return master


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write the bfloat16 number nearest to `master` (float32) and the int16 difference of their bits.

    Overwrites `master`. Halves go away from zero, not to even: int16 has no +32768.
    """
    weight.copy_(master)
    upper = weight.view(torch.int16)
    bits = master.view(torch.int32).sub_(weight.to(torch.float32).view(torch.int32))
    upper.add_(bits == 1 << 15)
    remainder.copy_(bits)


class MasterWeights(Optimizer):
    """An optimizer whose bfloat16 parameters move exactly as float32 ones do.

    Its `param_groups` hold the model's parameters, so clipping, scaling and schedules know nothing of it. `inner`
    works on float32 shadows of them, which are empty between steps; its states are float32. Parameters of other
    dtypes go to `inner` as they are.

    Args:
        inner: has not stepped yet; it takes each parameter alone, and passes over those without a gradient.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        groups = [{**group, "params": list(group["params"])} for group in inner.param_groups]
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        on_host = all(parameter.device.type == "cpu" for parameter in self.parameters)
        self.bucket_elements = CPU_BUCKET_ELEMENTS if on_host else BUCKET_ELEMENTS
        halves = [parameter for parameter in self.parameters if is_half(parameter)]
        self.shadows = {parameter: _empty_shadow(parameter) for parameter in halves}
        self.remainders = {parameter: torch.zeros_like(parameter, dtype=torch.int16) for parameter in halves}
        for group in inner.param_groups:
            group["params"] = [self.shadows.get(parameter, parameter) for parameter in group["params"]]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
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
            self._step(bucket)
        for parameter, gradient in others.items():
            parameter.grad = gradient

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        bucket: list[nn.Parameter] = []
        for parameter in self.shadows:
            if parameter.grad is None:
                continue
            if bucket and sum(each.numel() for each in (*bucket, parameter)) > self.bucket_elements:
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket

    def _step(self, bucket: Iterable[nn.Parameter]) -> None:
        for parameter in bucket:
            assert parameter.grad is not None
            shadow = self.shadows[parameter]
            hold(shadow, join(local(parameter.data), local(self.remainders[parameter])))
            shadow.grad = parameter.grad.float()
        self.inner.step()
        for parameter in bucket:
            shadow = self.shadows[parameter]
            shadow.grad = None
            split(local(shadow.data), local(parameter.data), local(self.remainders[parameter]))
            hold(shadow, _nothing(parameter))


def is_half(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16


def _empty_shadow(parameter: nn.Parameter) -> nn.Parameter:
    like = parameter.data
    if not isinstance(like, DTensor):
        return nn.Parameter(_nothing(parameter))
    nothing, shape, stride = _nothing(parameter), like.shape, like.stride()
    return nn.Parameter(
        DTensor.from_local(nothing, like.device_mesh, like.placements, shape=shape, stride=stride)
    )


def _nothing(parameter: nn.Parameter) -> Tensor:
    return local(parameter.data).new_empty([0] * parameter.ndim, dtype=torch.float32)
