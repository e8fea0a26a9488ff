"""What a process that trains sets for itself before anything else: seeds, determinism, threads, its GPU."""

import ctypes
import gc
import platform
import random

import numpy as np
import torch

from config.schema.config import Config


def prepare_process(config: Config, num_threads: int | None, device: torch.device | None) -> None:
    """num_threads: None leaves them to torch. device: of the model that this process trains, a GPU from now on "the
    current" one; None: others train it."""
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    # Filling new memory, which nobody reads before it is written, costs 5% of a small run.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if device is None:
        return
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(device)


def keep_freed_memory() -> None:
    """What this process frees it keeps for its next tensors, but the largest.

    Else every step gives its activations back to the kernel and gets them anew, page by page and filled with zeros:
    a quarter of an iteration of a 135M model. Only glibc has to be told so.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # as glibc's malloc.h numbers them
    # Blocks of so many bytes, the most that glibc takes, are no part of the heap: there they would leave holes.
    libc.mallopt(mmap_threshold, 32 * 2**20)
    libc.mallopt(trim_threshold, -1)  # the heap never shrinks


def release_memory() -> None:
    """Give back what this process's allocator keeps of a GPU and does not use: no other process could have it."""
    gc.collect()
    torch.cuda.empty_cache()
