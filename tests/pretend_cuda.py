"""Patches of torch.cuda for simulated GPUs: counts, streams, memory, grouping, autocast."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from torchgrpo.training import packed_attention

if TYPE_CHECKING:
    from tests.pretend_gpu import SimulatedGPUs

CARD_BYTES = 80 << 30
"""Memory that a simulated GPU reports."""


def _group_by_device(gpus: "SimulatedGPUs") -> Callable[..., Any]:
    """Returns torch's grouping for optimizers and gradient clipping, which reads devices in C++."""

    def group_tensors(lists: list[list[Any]], with_indices: bool = False) -> Any:
        groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
        for index, row in enumerate(zip(*[one or [None] * len(lists[0]) for one in lists], strict=True)):
            key = (gpus.device_of(row[0]), row[0].dtype)
            columns, indices = groups.setdefault(key, ([[] for _ in lists], []))
            for column, one, value in zip(columns, lists, row, strict=True):
                if one:
                    column.append(value)
            indices.append(index)
        return groups

    return group_tensors


class _Stream:
    """A CUDA stream or event whose work is always done."""

    cuda_stream = 0

    def __init__(self, device: Any = None, **more: Any) -> None:
        self.device = device

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    wait_stream = wait_event = record_event = record = wait = lambda self, *args: None


class _Runtime:
    """The CUDA runtime library, as far as pinning needs it."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def cuda_patches(gpus: "SimulatedGPUs") -> list[Any]:
    """Returns the patches of functions that query GPUs without a tensor."""

    def set_device(device: Any) -> None:
        gpus.current = gpus.parse_device(device).index

    def exchange_device(index: int) -> int:
        before = gpus.current
        if index >= 0:
            gpus.current = index
        return before

    def synchronize(device: Any = None) -> None:
        gpus.synchronized_devices.append(gpus.parse_device("cuda" if device is None else device))
        gpus.record_wait("synchronize")

    def properties(device: Any = None) -> Any:
        index = gpus.parse_device("cuda" if device is None else device).index
        return SimpleNamespace(name="simulated", uuid=f"simulated-{index}", total_memory=CARD_BYTES, major=9, minor=0)

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: gpus.count,
        "current_device": lambda: gpus.current,
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "_lazy_init": lambda: None,
        "_initialized": True,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)] * gpus.count,
        "set_rng_state_all": lambda states: [gpus.parse_device(index) for index, _ in enumerate(states)],
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (gpus.free_bytes, CARD_BYTES),
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "simulated",
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(device),
        "stream": lambda stream: nullcontext(),
        "Event": _Stream,
        "cudart": _Runtime,
        "check_error": lambda code: None,
        "ipc_collect": lambda: None,
    }
    patched = [mock.patch.object(torch.cuda, name, new) for name, new in cuda.items()]
    accelerator = {  # builds for CUDA read it directly
        "current_device_index": lambda: gpus.current,
        "current_stream": lambda device=None: _Stream(device),
    }
    patched += [mock.patch.object(torch.accelerator, name, new) for name, new in accelerator.items()]
    patched.append(mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", _group_by_device(gpus)))
    # A kernel that is compiled for a GPU cannot be simulated, so attention uses plain calls.
    patched.append(mock.patch.object(packed_attention, "FLEX_DEVICE_TYPES", ()))
    return patched + _autocast_patches()


def _autocast_patches() -> list[Any]:
    """Returns patches that give simulated GPUs the CPU's autocast, since their tensors are the CPU's."""
    init, enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def on_host(kind: str) -> str:
        return "cpu" if kind == "cuda" else kind

    def init_on_host(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, on_host(device_type), *args, **kwargs)

    return [
        mock.patch.object(torch.autocast, "__init__", init_on_host),
        mock.patch.object(torch, "is_autocast_enabled", lambda kind="cuda": enabled(on_host(kind))),
        mock.patch.object(torch, "get_autocast_dtype", lambda kind: dtype(on_host(kind))),
    ]
