"""Starts a thread in which an engine of this process computes."""

import threading
from collections.abc import Callable

import torch


def start_engine_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Starts a daemon thread with the caller's current GPU and torch's number of threads."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run_on_device() -> None:
        if device is not None:  # a new thread begins on GPU 0, where kernels of an engine on another GPU fail
            torch.cuda.set_device(device)
        # A new thread adopts torch's number of threads at torch's first query there; before it, OpenMP's own number
        # holds. A vLLM engine would plan its attention with one number and compute with the other.
        torch.get_num_threads()
        run()

    thread = threading.Thread(target=run_on_device, name=name, daemon=True)
    thread.start()
    return thread
