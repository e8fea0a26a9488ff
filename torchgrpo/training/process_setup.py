"""Sets seeds, determinism, threads, device and allocator of a training process, and releases GPU memory."""

import ctypes
import gc
import platform
import random

import numpy as np
import torch

from config.schema.config import Config


def prepare_process(config: Config, num_threads: int | None, device: torch.device | None) -> None:
    """Sets seeds, determinism, threads and the device of this process.

    num_threads: threads of torch; None leaves the number to torch. device: device of the model that this
    process trains, its current GPU from then on; None: other processes train the model.
    """
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    # torch would fill new memory in deterministic mode; no code here reads memory that it has not written.
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
    """Makes glibc keep freed memory for the next tensors, except for the largest blocks.

    Otherwise every step returns the memory of its activations to the kernel and gets it back page by page,
    filled with zeros. Other C libraries need no setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # as glibc's malloc.h numbers them
    # 32 MiB is the largest threshold that glibc accepts. Larger blocks stay outside the heap, where they would
    # leave holes.
    libc.mallopt(mmap_threshold, 32 * 2**20)
    libc.mallopt(trim_threshold, -1)  # the heap never shrinks


def release_memory() -> None:
    """Returns unused GPU memory of this process's allocator to the device, for other processes."""
    gc.collect()
    torch.cuda.empty_cache()
