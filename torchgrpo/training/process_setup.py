"""Sets seeds, determinism, threads, device and allocator of a training process, and releases GPU memory."""

import ctypes
import gc
import os
import platform
import random

import numpy as np
import torch

from config.schema.config import Config

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables by which a user configures torch's allocator of GPU memory."""


def prepare_process(
    config: Config, num_threads: int | None, device: torch.device | None, shares_gpu_memory: bool = False
) -> None:
    """Sets seeds, determinism, threads, the device and its allocator of this process.

    num_threads: threads of torch; None leaves the number to torch. device: device of the model that this
    process trains, its current GPU from then on; None: other processes train the model. shares_gpu_memory: other
    processes open tensors of this one on the GPU.
    """
    on_gpu = device is not None and device.type == "cuda"
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    deterministic = config.train.deterministic
    torch.use_deterministic_algorithms(not on_gpu if deterministic is None else deterministic, warn_only=True)
    # torch would fill new memory in deterministic mode; no code here reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if device is None:
        return
    if not on_gpu:
        keep_freed_memory()
        return
    torch.cuda.set_device(device)
    if not shares_gpu_memory:  # a process may not be allowed to open expandable segments of another one
        use_expandable_segments()


def use_expandable_segments() -> None:
    """Lets the allocator of GPU memory extend its segments, unless the user configures the allocator.

    Microbatches differ in length. Without this setting each length leaves segments in which the next one does not
    fit. The setting is made in this process alone: an environment variable would reach engines in child processes,
    whose kernels share memory by handles that these segments lack.
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


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


def take_peak_bytes(device: torch.device) -> int:
    """Returns the peak of allocated GPU memory since the last call.

    It is 0 for a CPU.
    """
    if device.type != "cuda":
        return 0
    peak_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak_bytes


def release_memory() -> None:
    """Returns unused GPU memory of this process's allocator to the device, for other processes."""
    gc.collect()
    torch.cuda.empty_cache()
