"""What a process that trains sets for itself before anything else: seeds, determinism, threads, its GPU."""

import gc
import random

import numpy as np
import torch

from config.schema import Config


def prepare_process(config: Config, num_threads: int | None, gpu: int | None) -> None:
    """num_threads: None leaves them to torch. gpu: the one that "the current GPU" is to mean; None: there is none."""
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    # Filling new memory, which nobody reads before it is written, costs 5% of a small run.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)


def release_memory() -> None:
    """Give back what this process's allocator keeps of a GPU and does not use: no other process could have it."""
    gc.collect()
    torch.cuda.empty_cache()
