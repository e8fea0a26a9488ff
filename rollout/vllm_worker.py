"""What runs inside vLLM's workers, and the files through which weights and adapters reach them."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SHARED_MEMORY = Path("/dev/shm")


def shared_folder() -> Path:
    """Where files live in memory: /dev/shm on Linux, else the folder for temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


class SharedFile:
    """A safetensors file in shared memory that lives as long as the `with` block.

    weights: (name, tensor) pairs; tied tensors are written once for each of their names.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights
        handle, name = tempfile.mkstemp(
            prefix=f"grpo_{os.getpid()}_", suffix=".safetensors", dir=shared_folder()
        )
        os.close(handle)
        self._path = Path(name)

    def __enter__(self) -> Path:
        seen: set[int] = set()
        tensors = {}
        for name, tensor in self._weights:
            host = tensor.detach().to("cpu").contiguous()
            storage = host.untyped_storage().data_ptr()
            tensors[name] = host.clone() if storage in seen else host
            seen.add(storage)
        save_file(tensors, self._path)
        return self._path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._path.unlink(missing_ok=True)


def write_adapter(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    rank: int,
    alpha: float,
    target_modules: Iterable[str],
) -> frozenset[str]:
    """Write a LoRA adapter in peft's format; returns the names written."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(target_modules),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return frozenset(tensors)


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`): a push through a file in shared memory."""

    def reload_from_file(self: Any, path: str) -> None:
        self.reload_weights(weights_iterator=iter(load_file(path).items()))
