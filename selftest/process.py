"""What runs in the process of one check."""

import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil

from config.broken_packages import broken_package
from config.errors import ConfigError
from config.files import written_whole
from selftest.check import Bench, Check

OUTCOME, OUTPUT = "outcome.json", "output.txt"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Whatever the user has set: numpy starts its threads as it is imported, and the process could not be forked."""
_DUMP_S = 2.0  # before the deadline, so that the stacks are there when the process is killed


def quiet_environment() -> None:
    """One thread, no hub, no telemetry talk; must come before numpy and torch are imported."""
    for name in _THREADS:
        os.environ[name] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # A package that asks at its import whether there is a GPU leaves the driver alone, and the process can be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def work(check: Check, folder: Path, seconds: float) -> None:
    """Do the check and leave OUTCOME in `folder`, beside OUTPUT with all that was printed.

    seconds: that it has since it was started; shortly before, the stacks of all threads are written to OUTPUT.
    """
    quiet_environment()
    os.setsid()  # the process group that the runner ends with it
    threading.Thread(target=_end_with_the_selftest, name="watch", daemon=True).start()
    with (folder / OUTPUT).open("w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        faulthandler.enable(output)
        left = left_of(seconds)
        faulthandler.dump_traceback_later(max(left - _DUMP_S, left / 2), file=output)
        outcome = json.dumps(_tried(check, folder))
        with written_whole(folder / OUTCOME) as told:
            told.write(outcome.encode())
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        sys.stdout.flush()


def left_of(seconds: float) -> float:
    """What is left of these since this process was started: a fresh one has imported for some of them. Above 0."""
    age: float = time.time() - psutil.Process().create_time()
    return max(0.1, seconds - age)


def _end_with_the_selftest() -> None:
    """Whatever ends it, this process group ends too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _tried(check: Check, folder: Path) -> dict[str, str]:
    bench_folder = folder / "bench"
    bench_folder.mkdir()
    try:
        detail = check.function(Bench(bench_folder, check.device), **check.options)
        return {"status": "works", "detail": detail, "trace": "", "remedy": ""}
    except BaseException as error:
        broken = broken_package(error)
        own = broken is not None or isinstance(error, ConfigError)  # it names its remedy
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        return {
            "status": "does not",
            "detail": broken or (str(error) if own else f"{type(error).__name__}: {said}"),
            "trace": traceback.format_exc(),
            "remedy": "" if own else check.remedy,
        }
