"""Prepares a process for vLLM: version check, variables, imports, redirected output, restored state.

Importing this module does not import vLLM.
"""

import importlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import torch

from config.schema.errors import ConfigError
from torchgrpo.cluster.socket_paths import shorten_temporary_folders
from torchgrpo.plan.machine import installed_vllm

_OUTPUT_DESCRIPTORS = (1, 2)
TESTED_VERSIONS = ((0, 32), (0, 33))
INSTALL_REMEDY = "install it (`make vllm`: the CUDA build if an NVIDIA GPU is present, otherwise the CPU build)"


def check_version() -> None:
    """Warns if the installed vLLM is not a tested version.

    Raises ConfigError if none is installed.
    """
    version = installed_vllm()
    if version is None:
        raise ConfigError(f"vLLM is not installed; {INSTALL_REMEDY}")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    low, high = TESTED_VERSIONS
    if not low <= numbers < high:
        warnings.warn(
            f"vLLM {version} is installed; this code was tested with {low[0]}.{low[1]} up to, not including, "
            f"{high[0]}.{high[1]}: the weight check after a push shows whether weights still arrive",
            stacklevel=3,
        )


def set_environment() -> None:
    """Sets environment variables of vLLM; must be called before the first `import vllm`."""
    shorten_temporary_folders()  # the processes of a split engine communicate by sockets there
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it is in whole GiB and would override kv_cache_bytes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # FlashInfer's sampler supports neither seeds nor processed log-probs, so vLLM would load it without using it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def import_in_thread(name: str) -> ModuleType:
    """Imports vLLM, or a module that imports vLLM, in a thread.

    The thread hides the caller's stack frames. vLLM keeps the exceptions of failed imports. Each exception keeps
    all its frames alive, and with the caller's frames it would keep a run and its model after the end of the run.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restores the process state that vLLM changes, at the end of the block.

    vLLM seeds the global generators, also of GPUs, sets torch to one thread, disables `torch.set_num_threads`, and
    sets environment variables that processes started later would inherit.
    """
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
def redirect_output(path: str | None) -> Iterator[None]:
    """Redirects standard output and error to the end of a file while the block runs.

    This includes processes started in the block. vLLM and the libraries that it imports print without any logger.
    Nothing is redirected if `path` is None or its folder does not exist, as on another machine.
    """
    if path is None or not Path(path).parent.is_dir():
        yield
        return
    _flush()
    kept = [os.dup(number) for number in _OUTPUT_DESCRIPTORS]
    with open(path, "ab") as file:
        for number in _OUTPUT_DESCRIPTORS:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        _flush()
        for number, own in zip(_OUTPUT_DESCRIPTORS, kept, strict=True):
            os.dup2(own, number)
            os.close(own)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def last_output(path: str | None) -> str:
    """Returns the last lines of redirected output, for an error message."""
    if path is None or not Path(path).is_file():
        return ""
    _flush()
    last = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\nLast lines of its output:\n" + "\n".join(f"  {line}" for line in last) if last else ""


def shared_memory_files_of_workers() -> set[Path]:
    """Returns the shared-memory files of tensor-parallel CPU workers of this process.

    vLLM does not remove these files.
    """
    files = set(Path("/dev/shm").glob("vllm_dist_*"))
    ours: set[Path] = set()
    for worker in psutil.Process().children(recursive=True) if files else []:
        with suppress(psutil.NoSuchProcess):
            ours.update(Path(mapped.path) for mapped in worker.memory_maps())
    return files & ours
