"""How weights leave the learner: names, merged adapters, and the ways to the engines behind one `push`.

InProcess      engine in this process     live tensors, copied by the engine
SharedMemory   engines on this host       one copy into memory that all of them map
ObjectStore    engines on other hosts     one copy into Ray's object store
NativeTransfer engines on GPUs            vLLM's own API: nccl, or ipc on one device (vllm_transfer.py)
"""

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from config.errors import ConfigError
from rollout.engine import Engine
from rollout.engine_host import WeightHandle

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Deliver = Callable[[WeightHandle, int], None]


class Transport(Protocol):
    name: str

    def push(self, weights: NamedTensors, version: int) -> None:
        """Return when every live engine draws its tokens with these weights."""
        ...

    def close(self) -> None: ...


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a policy under its Hugging Face name: tied heads under both names, LoRA merged in.

    The training weights are not touched. Raises ConfigError for LoRA variants without a plain merge (DoRA).
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        yield from ((name, tensor.detach()) for name, tensor in model.state_dict().items())
        return
    modules = dict(model.get_base_model().named_modules())
    for name, tensor in model.get_base_model().state_dict().items():
        if "lora_" in name or ".original_module." in name:
            continue
        owner = name.split(".base_layer.")[0] if ".base_layer." in name else None
        yield _plain_name(name), _merged(modules[owner], tensor) if owner else tensor.detach()


def adapter_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The LoRA tensors of a peft model alone, under peft's names (`inference_model.lora=adapter`)."""
    from peft.utils import get_peft_model_state_dict

    yield from ((name, tensor.detach()) for name, tensor in get_peft_model_state_dict(model).items())


def _plain_name(name: str) -> str:
    """The Hugging Face name of a tensor inside peft's wrappers."""
    parts = name.replace(".base_layer.", ".").split(".")
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        parts = parts[:at] + parts[at + 2 :]
    return ".".join(parts)


def _merged(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """weight + scale * B A of the active adapters; a layer's bias passes unchanged."""
    if tensor.ndim < 2:
        return tensor.detach()
    if any(layer.use_dora.get(adapter, False) for adapter in layer.active_adapters):
        raise ConfigError("a DoRA adapter cannot be pushed merged: train_model.lora supports plain LoRA")
    with torch.no_grad():
        merged = tensor.detach().clone()
        for adapter in layer.active_adapters:
            merged += layer.get_delta_weight(adapter).to(merged.dtype)
    return merged


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a buffer; two names of a tied tensor share their bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def view(self, buffer: Any) -> torch.Tensor:
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)


@dataclass
class Layout:
    """The bytes of a set of named tensors, one after the other, each aligned to 64."""

    entries: list[Entry] = field(default_factory=list)
    sources: list[tuple[Entry, torch.Tensor]] = field(default_factory=list)
    size: int = 0

    @classmethod
    def of(cls, weights: NamedTensors) -> "Layout":
        layout = cls()
        places: dict[tuple[object, ...], int] = {}
        for name, tensor in weights:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            known = places.get(key) if tensor.numel() else None
            entry = Entry(name, tensor.dtype, tuple(tensor.shape), layout.size if known is None else known)
            layout.entries.append(entry)
            if known is None:
                places[key] = layout.size
                layout.sources.append((entry, tensor))
                layout.size += -(-tensor.nbytes // 64) * 64
        return layout

    def write(self, buffer: Any) -> None:
        with torch.no_grad():
            for entry, tensor in self.sources:
                entry.view(buffer).copy_(tensor)


@dataclass(frozen=True)
class MappedWeights:
    """A handle on `SharedMemory`: any process of this user on this host can open it."""

    path: str
    size: int
    entries: list[Entry]

    def open(self) -> Iterator[tuple[str, torch.Tensor]]:
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        yield from ((entry.name, entry.view(mapped)) for entry in self.entries)


@dataclass(frozen=True)
class StoredWeights:
    """A handle on `ObjectStore`: any worker of the Ray cluster can open it."""

    reference: Any
    entries: list[Entry]

    def open(self) -> Iterator[tuple[str, torch.Tensor]]:
        import ray

        stored = ray.get(self.reference)
        yield from ((entry.name, entry.view(stored)) for entry in self.entries)


class InProcess:
    """An engine in this process reads the learner's tensors themselves."""

    name = "in_process"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def push(self, weights: NamedTensors, version: int) -> None:
        self._engine.load_weights(weights, version)

    def close(self) -> None:
        pass


class SharedMemory:
    """One anonymous block of memory, filled anew by each push; the kernel frees it with this process.

    deliver: hands a handle to every engine and returns when all have loaded it.
    """

    name = "shared_memory"

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._file: int | None = None
        self._mapped: mmap.mmap | None = None

    def push(self, weights: NamedTensors, version: int) -> None:
        layout = Layout.of(weights)
        if self._mapped is None or len(self._mapped) < layout.size:
            self.close()
            self._file = os.memfd_create("grpo_weights")
            os.ftruncate(self._file, layout.size)
            self._mapped = mmap.mmap(self._file, layout.size)
        layout.write(self._mapped)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._deliver(MappedWeights(path, layout.size, layout.entries), version)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._mapped = None, None


class ObjectStore:
    """Ray's object store carries the bytes to whichever hosts the engines are on."""

    name = "object_store"

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def push(self, weights: NamedTensors, version: int) -> None:
        import numpy as np
        import ray

        layout = Layout.of(weights)
        packed = np.empty(layout.size, dtype=np.uint8)
        layout.write(packed)
        self._deliver(StoredWeights(ray.put(packed), layout.entries), version)

    def close(self) -> None:
        pass
