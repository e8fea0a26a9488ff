"""What a vLLM engine is started with: settings, versions, the process around it. No vLLM is imported here."""

import importlib
import json
import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from config.schema.errors import ConfigError
from torchgrpo.cluster.sockets import make_room_for_sockets
from torchgrpo.plan.machine import installed_vllm

_OUTPUT = (1, 2)
TESTED = ((0, 32), (0, 33))
INSTALL = "install it (`make vllm`: the CUDA build where an NVIDIA GPU is, else the CPU build)"


@dataclass(frozen=True)
class AdapterShape:
    """The LoRA adapter that pushes will carry (`inference_model.lora=adapter`)."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    def write(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the adapter in peft's format, for vLLM's workers to load."""
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.target_modules),
            "bias": "none",
            "use_dora": False,
            "use_rslora": False,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class VLLMSettings:
    """What a vLLM engine is started with; picklable.

    model: folder or hub name. eos_token_ids: any of these ends a completion.
    device: "cpu", or "cuda" for the first visible GPU(s).
    kv_cache_bytes: of the engine, all its devices together; None takes what `gpu_memory_utilization` leaves (GPU only).
    max_num_batched_tokens: that one step computes at most; None leaves it to vLLM. On a CPU the engine decides.
    async_scheduling: the host prepares a step while the GPU computes the one before; requests in flight are then
        finished before a push, whatever `update` says. vLLM ignores it on a CPU.
    update: what `load` does with requests in flight.
    adapter: pushes carry this adapter instead of full weights.
    sleep: the engine can `sleep` (colocated GPUs).
    weight_transfer: vLLM's native backend that pushes use, "nccl" or "ipc".
    log: file that takes what vLLM prints while it starts; None: the terminal.
    """

    model: str
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = False
    enforce_eager: bool = True
    quantization: str | None = None
    update: str = "keep"
    adapter: AdapterShape | None = None
    sleep: bool = False
    weight_transfer: str | None = None
    request_timeout_s: float = 900.0
    log: str | None = None


def check_version() -> None:
    version = installed_vllm()
    if version is None:
        raise ConfigError(f"vLLM is not installed; {INSTALL}")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    low, high = TESTED
    if not low <= numbers < high:
        warnings.warn(
            f"vLLM {version} is installed; this code was tested with {low[0]}.{low[1]} up to, not including, "
            f"{high[0]}.{high[1]}: the weight check after a push tells whether it still does the same",
            stacklevel=3,
        )


def set_environment() -> None:
    """Must come before the first `import vllm`."""
    make_room_for_sockets()  # through which the processes of a split engine talk
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, and it would override kv_cache_bytes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # It takes no seeds and gives no log-probs of what it drew from, so vLLM would load it and never ask it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def import_in_thread(name: str) -> ModuleType:
    """Imports vLLM, or a module that brings it, with no frame of the caller's below.

    vLLM keeps the exceptions of what it could not import. Each of them keeps all frames that it was raised in, and so a
    run with its model after its end.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Undo what vLLM does to its process: seeded global generators, of GPUs too, one thread for torch and
    `torch.set_num_threads` disabled, variables that would reach every process started later."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    variables = {name: os.environ.get(name) for name in ("LD_PRELOAD", "TORCHINDUCTOR_COMPILE_THREADS")}
    try:
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        for device, state in enumerate(cuda_states):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def output_into(path: str | None) -> Iterator[None]:
    """Standard output and error of this process, and of those that it starts, go to the end of a file meanwhile.

    vLLM, what it imports and the libraries beneath print past any logger. Without a file, or where its folder is on
    another machine, nothing changes.
    """
    if path is None or not Path(path).parent.is_dir():
        yield
        return
    _flush()
    kept = [os.dup(number) for number in _OUTPUT]
    with open(path, "ab") as file:
        for number in _OUTPUT:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        _flush()
        for number, own in zip(_OUTPUT, kept, strict=True):
            os.dup2(own, number)
            os.close(own)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def end_of_output(path: str | None) -> str:
    """The last 15 lines of such a file, for whoever has to know why a start failed; empty where there are none."""
    if path is None or not Path(path).is_file():
        return ""
    _flush()
    last = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\nThe end of what it printed:\n" + "\n".join(f"  {line}" for line in last) if last else ""


def communication_files() -> set[Path]:
    """Through these the tensor-parallel workers of this process's CPU engines talk; vLLM does not remove them."""
    files = set(Path("/dev/shm").glob("vllm_dist_*"))
    ours: set[Path] = set()
    for worker in psutil.Process().children(recursive=True) if files else []:
        with suppress(psutil.NoSuchProcess):
            ours.update(Path(mapped.path) for mapped in worker.memory_maps())
    return files & ours
