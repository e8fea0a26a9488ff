"""Tries checks one after the other, each in a process of its own with a deadline.

A crash, a hang, or GPU memory that is not given back ends with the process, and takes no other check down.
"""

import json
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from cluster.sockets import make_room_for_sockets
from plan.machine import Machine
from selftest.check import Check, Device, Row
from selftest.process import OUTCOME, OUTPUT, work

TOTAL_S = 300.0
OVER = "the time of the whole self-test was over"
ANOTHER_TIME = "run it when the machine has less to do"
MANY_CORES = 8
PROJECT = Path(__file__).resolve().parents[1]
_LINES = 30  # of a trace


class Processes:
    """Starts the processes of the checks by a context of multiprocessing; see `forked` and `fresh`."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._running: set[BaseProcess] = set()
        self._closed = False

    def end(self) -> None:
        """Kills what runs, and starts nothing more."""
        self._closed = True
        for process in list(self._running):
            _end(process)

    @contextmanager
    def running(self, *arguments: Any) -> Iterator[BaseProcess]:
        """A process that does `work`; gone after the block, with all that it started."""
        process = self.start(*arguments)
        self._running.add(process)
        try:
            if self._closed:
                raise KeyboardInterrupt
            yield process
        finally:
            self._running.discard(process)
            _end(process)

    def start(self, *arguments: Any) -> BaseProcess:
        try:
            return self._started(arguments)
        except (OSError, EOFError):  # the server ended over its imports
            self._context = multiprocessing.get_context("spawn")
            return self._started(arguments)

    def _started(self, arguments: tuple[Any, ...]) -> BaseProcess:
        process: BaseProcess = self._context.Process(target=work, args=arguments)
        process.start()
        return process


def fresh() -> Processes:
    """Each imports what it needs."""
    return Processes(multiprocessing.get_context("spawn"))


def forked() -> Processes:
    """Forked from a server that has imported everything; fresh ones where that does not start."""
    make_room_for_sockets()  # the server listens at one
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["selftest.preload"])
    outer = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PROJECT), *filter(None, [outer])])
    try:  # the server does not get our import path by other means
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if outer is not None:
            os.environ["PYTHONPATH"] = outer
    return Processes(context)


def run_checks(
    checks: Sequence[Check],
    machine: Machine,
    vllm_build: Device | None,
    said: Callable[[Row], None],
    processes: Processes,
    total_s: float = TOTAL_S,
) -> list[Row]:
    """A row for each check, told to `said` as soon as it is known; within `total_s` seconds.

    Where a machine has GPUs and cores to spare, the checks on the CPU run beside those on GPUs.
    """
    deadline = time.monotonic() + total_s

    def tried(check: Check) -> Row:
        row = _try(check, machine, vllm_build, processes, deadline)
        said(row)
        return row

    beside = bool(machine.num_gpus) and (os.cpu_count() or 1) >= MANY_CORES
    lanes = {device: ThreadPoolExecutor(1) for device in ("cpu", "cuda")}
    try:
        futures = [lanes[check.device if beside else "cpu"].submit(tried, check) for check in checks]
        return [future.result() for future in futures]
    except BaseException:
        processes.end()  # else a lane would wait for its check
        raise
    finally:
        for lane in lanes.values():
            lane.shutdown(cancel_futures=True)


def _try(
    check: Check, machine: Machine, vllm_build: Device | None, processes: Processes, deadline: float
) -> Row:
    lacking = check.missing(machine, vllm_build)
    if lacking is not None:
        return Row(check.name, "not here", 0.0, lacking)
    left = deadline - time.monotonic()
    if left <= 0:
        return Row(check.name, "does not", 0.0, f"not tried: {OVER}", ANOTHER_TIME)
    row = run_check(check, processes, min(check.seconds, left))
    if left < check.seconds and row.seconds >= left:
        return replace(row, detail=f"not tried to its end: {OVER}", remedy=ANOTHER_TIME)
    return row


def run_check(check: Check, processes: Processes, seconds: float) -> Row:
    """The check in a process of its own, which is gone afterwards with all that it started."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grpo_selftest_", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        with processes.running(check, folder, seconds) as process:
            process.join(seconds)
            ended = process.exitcode
        ending = _ending(ended, seconds)
        return _row(check, folder, ended, ending, time.monotonic() - began)


def _end(process: BaseProcess) -> None:
    """Kills the process, its group, and what left the group."""
    pid = process.pid
    assert pid is not None
    others: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        others = psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for one in others:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if process.exitcode is None:
        process.kill()
    process.join()


def _row(check: Check, folder: Path, exit_code: int | None, ending: str, seconds: float) -> Row:
    output, outcome = folder / OUTPUT, folder / OUTCOME
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    trace = "\n".join(lines[-_LINES:])
    if not outcome.exists():
        why = ending + (_place(lines) if exit_code is None else "")
        return Row(check.name, "does not", seconds, why, check.remedy, trace)
    told = json.loads(outcome.read_text(encoding="utf-8"))
    if told["status"] == "works" and exit_code != 0:
        why = f"it worked, but {ending} when it should have ended"
        return Row(check.name, "does not", seconds, why, check.remedy, trace)
    said = "\n".join(told["trace"].splitlines()[-_LINES:])
    return Row(check.name, told["status"], seconds, told["detail"], told["remedy"], said)


def _ending(exit_code: int | None, waited_s: float) -> str:
    if exit_code is None:
        return f"its process was not finished after {waited_s:.0f} s"
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code}"
    return f"its process was ended by {signal.Signals(-exit_code).name}"


def _place(lines: Sequence[str]) -> str:
    """Where the main thread stood: its stack is the last that faulthandler writes, innermost frame first."""
    starts = [number for number, line in enumerate(lines) if re.match(r"(Current thread|Thread) 0x", line)]
    frames = lines[starts[-1] + 1 :] if starts else []
    return f", in {frames[0].strip()}" if frames else ""
