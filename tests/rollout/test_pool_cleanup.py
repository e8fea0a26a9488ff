"""Tests that an engine pool leaves nothing behind, however its driver process ends."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.long

PROJECT = Path(__file__).resolve().parents[2]

DRIVER_SCRIPT = """
import sys, time
from functools import partial
import torch
from envs.group import Sampling
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from tests.rollout.pool_engines import CountingEngine

transport = WeightTransport(SharedMemory())
pool = RayEnginePool(partial(CountingEngine, 0.01), [DeviceSlot("engine 0")], EnginePoolSettings(), transport)
try:
    pool.load([("sum", torch.ones(1000))], version=1)
    pool.submit(Request(1, (1, 2), 2, Sampling(), seed=1))
    while pool.in_flight:
        pool.step(1.0)
    print("ready", flush=True)
    while sys.argv[1] == "interrupt":
        time.sleep(0.1)  # a signal to another thread would not end one long sleep
    sys.stdin.readline()  # the test has recorded the processes and files
    if sys.argv[1] == "exception":
        raise RuntimeError("the learner failed")
finally:
    pool.close()
"""


def marked_processes(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("GRPO_TEST_MARK") == mark:
                yield process


def names(processes: Iterable[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found.append(f"{process.pid} {process.name()}")
    return found


def shared_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Returns the shared-memory files that these processes have mapped.

    Files of other processes on this machine do not count.
    """
    found: set[Path] = set()
    for process in processes:
        with suppress(psutil.Error):
            found.update(Path(mapped.path) for mapped in process.memory_maps())
    return {path for path in found if path.parent == Path("/dev/shm")}


def listening_addresses(pid: int) -> list[str]:
    addresses = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found = process.net_connections("tcp")
        except psutil.Error:
            continue
        addresses += [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
    return addresses


@contextmanager
def running_driver(end: str, mark: str) -> Iterator[subprocess.Popen[str]]:
    """Runs DRIVER_SCRIPT in a process with `mark` in its environment; ends it after the test."""
    run = subprocess.Popen(
        [sys.executable, "-c", DRIVER_SCRIPT, end],
        cwd=PROJECT,
        env={**os.environ, "GRPO_TEST_MARK": mark, "PYTHONPATH": str(PROJECT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield run
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize("end", ["normal", "exception", "interrupt", "kill"])
def test_nothing_remains(end: str) -> None:
    """Processes, actors and shared memory are gone after every end; nothing listens beyond loopback."""
    mark = uuid.uuid4().hex
    with running_driver(end, mark) as run:
        assert run.stdin is not None and run.stdout is not None
        ready = run.stdout.readline() == "ready\n"
        assert ready, run.communicate(timeout=900)[1]
        memory = shared_files(marked_processes(mark))
        assert memory, "Ray's object store at least"
        if end in ("interrupt", "kill"):
            listening = listening_addresses(run.pid)
            assert listening
            assert all(ip.removeprefix("::ffff:").startswith("127.") or ip == "::1" for ip in listening)
        if end in ("normal", "exception"):
            run.stdin.close()
        if end == "interrupt":
            os.killpg(run.pid, signal.SIGINT)  # like Ctrl-C in a terminal: to the driver and its children
        if end == "kill":
            os.kill(run.pid, signal.SIGKILL)
        code = run.wait(timeout=900)
    assert code == {"normal": 0, "exception": 1, "interrupt": -signal.SIGINT, "kill": -signal.SIGKILL}[end]
    # After SIGKILL, Ray's two agents may try for 60 s to report to a server that has ended too.
    deadline = time.monotonic() + 600
    while (left := names(marked_processes(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (left, {file for file in memory if file.exists()}) == ([], set())
