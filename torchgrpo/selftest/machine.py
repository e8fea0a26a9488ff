"""Checks of the machine: packages, a sandbox, trackers, Ray."""

import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

from config.schema.logging import LoggingConfig
from torchgrpo.selftest.check import Bench


def sandbox(bench: Bench) -> str:
    """The strongest level that works here, and a program run in it."""
    from envs.sandbox.sandbox import Sandbox

    with Sandbox("auto") as box:
        done = box.run("print(int(input()) + 1)", b"41\n")
        assert done.stdout == b"42\n", f"a program printed {done.stdout!r} and {done.stderr!r}, not 42"
        return f"level {box.level}"


def trackers(bench: Bench) -> str:
    """TensorBoard and offline W&B take a number and leave a file."""
    from torchgrpo.monitoring.tracking import make_tracker

    os.environ["WANDB_DIR"] = str(bench.folder)
    for backend, pattern in (("tensorboard", "events.out.tfevents.*"), ("wandb", "*.wandb")):
        tracker = make_tracker(LoggingConfig(backend=backend, mode="offline"), bench.folder, {"seed": 0})
        assert tracker is not None
        tracker.metrics({"reward/mean": 0.5}, 1)
        tracker.close("finished")
        assert not (told := tracker.told()), "; ".join(told)
        assert list(bench.folder.rglob(pattern)), f"{backend} left no file"
    return "TensorBoard, W&B offline"


def ray_runtime(bench: Bench) -> str:
    """A local runtime on loopback, and a task in a process of its own."""
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


def packages(bench: Bench, names: Sequence[str]) -> str:
    """The packages load, and torch sees the GPUs that the driver tells of."""
    import torch

    from torchgrpo.plan.machine import visible_gpus

    for name in names:
        importlib.import_module(name)
    seen, there = torch.cuda.device_count(), len(visible_gpus())
    assert seen == there, f"torch {torch.__version__} sees {seen} of the driver's {there} GPUs"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
