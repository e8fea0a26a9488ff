"""What an optimizer remembers, in the host's memory: it visits the parameters' device for the step alone
(`train_model.offload=optimizer`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchgrpo.training.sharding import local


class HostStates:
    """Where the states of an optimizer are between two steps.

    Args:
        states: all of them by name, live, each with the memory of its own that this process has.
        device: of the step.
    """

    def __init__(self, states: Callable[[], Mapping[str, Tensor]], device: torch.device) -> None:
        self._states = states
        self._device = device
        self._host: dict[str, Tensor] = {}

    @contextmanager
    def visit(self) -> Iterator[None]:
        """They are on the device inside, and their memory there is free again afterwards."""
        for tensor in self._states().values():
            hold(tensor, local(tensor).to(self._device, non_blocking=True))
        try:
            yield
        finally:
            for name, tensor in self._states().items():
                values = local(tensor)
                if name not in self._host:
                    # The same at each step; pinned, a GPU reads it at the bus's full rate.
                    pinned = self._device.type == "cuda"
                    self._host[name] = torch.empty(
                        values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned
                    )
                hold(tensor, self._host[name].copy_(values))


def hold(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor stand for other memory: of a DTensor, whose data cannot be set, this rank's own part."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = values
    else:
        tensor.data = values
