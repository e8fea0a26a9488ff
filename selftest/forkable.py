"""Imports modules into a process that is to be forked afterwards: no thread runs then, and no CUDA driver is in use.

What a module's import starts cannot be undone. So the process begins again (exec) without that module, which its forks
then import themselves.
"""

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

LEFT_OUT = "GRPO_SELFTEST_LEFT_OUT"
MOST_LEFT_OUT = 3
"""Modules; where more of them start something, they have a cause in common, and beginning again does not help."""
ALLOCATOR = "jemalloc_bg_thd"
"""Its thread is no hindrance: jemalloc starts it anew in a fork. pyarrow brings it, which scikit-learn and so
transformers import where they find it."""
NVIDIA = "cuda"
"""How the names of threads of NVIDIA's libraries begin. NVML starts one as vLLM looks for GPUs at its import; forks of
such a process used CUDA and NVML on an H200 under driver 580. Of CUDA itself the driver tells."""
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def load(modules: Sequence[str]) -> None:
    """Imports all of them that can be imported and leave the process fit to be forked.

    Raises:
        SystemExit: it cannot be made fit.
    """
    left_out = os.environ.get(LEFT_OUT, "").split()
    for name in modules:
        if name in left_out:
            continue
        with contextlib.suppress(Exception):  # what cannot be imported is for the forks to tell
            importlib.import_module(name)
        started = hindrance()
        if started and len(left_out) == MOST_LEFT_OUT:
            sys.exit(f"imports have started {started}: every check starts from nothing, and slower")
        if started:
            print(
                f"importing {name} starts {started}: each check imports it by itself",
                file=sys.stderr,
                flush=True,
            )
            os.environ[LEFT_OUT] = " ".join([*left_out, name])
            os.execv(sys.executable, sys.orig_argv)
    os.environ.pop(LEFT_OUT, None)


def hindrance() -> str | None:
    """What this process has that does not survive a fork."""
    if others := _other_threads():
        return f"a thread ({', '.join(others)})"
    return "the CUDA driver" if _driver_in_use() else None


def _driver_in_use() -> bool:
    """Asked of the driver itself, where it is loaded: its devices' files are opened by NVML too."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    counted: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return counted != NOT_INITIALIZED


def _other_threads() -> list[str]:
    """Names of this process's threads but for the first, the allocator's and NVIDIA's; their numbers where the system
    tells no names."""
    first, tasks = str(os.getpid()), Path("/proc/self/task")
    if not tasks.is_dir():
        return [number for thread in psutil.Process().threads() if (number := str(thread.id)) != first]
    names = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # it has ended by now
            if task.name != first:
                names.append((task / "comm").read_text().strip())
    return [name for name in names if name != ALLOCATOR and not name.startswith(NVIDIA)]
