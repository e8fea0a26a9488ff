"""Optimizer states in host memory except during an optimizer step (`train_model.offload=optimizer`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchgrpo.training.sharding import local_shard


class OffloadedStates:
    """Keeps the states of an optimizer in host memory between two steps.

    Args:
        states: returns all states by name, live; each has memory of its own in this process.
        device: the device of the step.
    """

    def __init__(self, states: Callable[[], Mapping[str, Tensor]], device: torch.device) -> None:
        self._states = states
        self._device = device
        self._host: dict[str, Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Moves the states to the device for the block, and back afterwards."""
        for tensor in self._states().values():
            swap_storage(tensor, local_shard(tensor).to(self._device, non_blocking=True))
        try:
            yield
        finally:
            for name, tensor in self._states().items():
                values = local_shard(tensor)
                if name not in self._host:
                    # The buffer serves all steps. A GPU copies pinned memory at full bus rate.
                    is_pinned = self._device.type == "cuda"
                    self._host[name] = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=is_pinned)
                swap_storage(tensor, self._host[name].copy_(values))


def swap_storage(tensor: Tensor, values: Tensor) -> None:
    """Gives a tensor other memory.

    The data of a DTensor cannot be set, so its local shard is replaced.
    """
    if isinstance(tensor, DTensor):
        tensor._local_tensor = values
    else:
        tensor.data = values
