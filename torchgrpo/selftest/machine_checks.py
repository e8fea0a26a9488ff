"""Checks that packages import, a sandbox runs, trackers write files, and Ray starts."""

import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

from config.schema.logging import LoggingConfig
from torchgrpo.selftest.check import CheckWorkspace


def check_sandbox(workspace: CheckWorkspace) -> str:
    """Runs a program in the strongest sandbox level that works on this machine."""
    from envs.sandbox.sandbox import Sandbox

    with Sandbox("auto") as sandbox:
        result = sandbox.run("print(int(input()) + 1)", b"41\n")
        assert result.stdout == b"42\n", f"a program printed {result.stdout!r} and {result.stderr!r}, not 42"
        return f"level {sandbox.level}"


def check_trackers(workspace: CheckWorkspace) -> str:
    """Logs a number to TensorBoard and offline W&B, and checks their files."""
    from torchgrpo.monitoring.tracker_threads import make_tracker

    os.environ["WANDB_DIR"] = str(workspace.folder)
    for backend, pattern in (("tensorboard", "events.out.tfevents.*"), ("wandb", "*.wandb")):
        tracker = make_tracker(LoggingConfig(backend=backend, mode="offline"), workspace.folder, {"seed": 0})
        assert tracker is not None
        tracker.metrics({"reward/mean": 0.5}, 1)
        tracker.close("finished")
        assert not (messages := tracker.take_messages()), "; ".join(messages)
        assert list(workspace.folder.rglob(pattern)), f"{backend} left no file"
    return "TensorBoard, W&B offline"


def check_ray(workspace: CheckWorkspace) -> str:
    """Starts a local Ray runtime, and runs a task in another process."""
    import ray

    from torchgrpo.cluster.runtime import start_ray

    start_ray(None, num_cpus=1)
    try:
        task: Any = ray.remote(lambda number: (math.isqrt(number), os.getpid()))
        answer, pid = ray.get(task.remote(1764))
    finally:
        ray.shutdown()
    assert answer == 42 and pid != os.getpid()
    return "a local runtime answers"


def check_packages(workspace: CheckWorkspace, names: Sequence[str]) -> str:
    """Imports packages, and checks that torch finds the GPUs of the driver."""
    import torch

    from torchgrpo.plan.machine import visible_gpus

    for name in names:
        importlib.import_module(name)
    num_torch_gpus, num_driver_gpus = torch.cuda.device_count(), len(visible_gpus())
    assert num_torch_gpus == num_driver_gpus, (
        f"torch {torch.__version__} sees {num_torch_gpus} of the driver's {num_driver_gpus} GPUs"
    )
    return f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
