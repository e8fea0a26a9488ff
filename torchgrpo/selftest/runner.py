"""Runs checks: a process for each group of them, a deadline for each check.

A crash, a hang, or GPU memory that is not given back ends with the process, and takes no other check down.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from time import monotonic, sleep

from torchgrpo.plan.machine import Machine
from torchgrpo.selftest.check import Check, Device, Row
from torchgrpo.selftest.child import CHECKS, RESULTS, end_tree, last_lines

OUTPUT = "output.txt"
EXIT_S = 60.0
"""For the end of a process whose checks are done: Ray, vLLM and loggers tidy up there."""
PROJECT = str(Path(__file__).resolve().parents[2])
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # models are tiny
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_SILENT": "true",
}


def run_checks(checks: Sequence[Check], machine: Machine, vllm_build: Device | None) -> Iterator[Row]:
    """Yields a row for each check as it ends; those that are not here come last."""
    lacking = {check.name: check.missing(machine, vllm_build) for check in checks}
    possible = [check for check in checks if lacking[check.name] is None]
    for _, group in groupby(possible, key=lambda check: check.group):
        yield from run_group(list(group))
    for name, reason in lacking.items():
        if reason is not None:
            yield Row(name, "not here", 0.0, reason)


def run_group(checks: Sequence[Check]) -> Iterator[Row]:
    """Yields a row for each check; one without a result leaves the rest to a new process."""
    done = 0
    while done < len(checks):
        with tempfile.TemporaryDirectory(prefix="grpo_selftest_", ignore_cleanup_errors=True) as folder:
            for row in _run_in_one_process(checks[done:], Path(folder)):
                done += 1
                yield row


def _run_in_one_process(checks: Sequence[Check], folder: Path) -> Iterator[Row]:
    """Yields rows until a check dies or runs out of time; no process is left."""
    (folder / CHECKS).write_text(json.dumps([asdict(check) for check in checks]))
    path = os.pathsep.join([PROJECT, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "torchgrpo.selftest.child", str(folder)],
            cwd=folder,
            env={**os.environ, **SETTINGS, "PYTHONPATH": path},
            stdin=subprocess.PIPE,  # its end tells the process that this one is gone
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for number, check in enumerate(checks):
            row = _result(check, number, process, folder)
            if row is not None:
                yield row
                continue
            trace, code = last_lines((folder / OUTPUT).read_text(errors="replace")), process.returncode
            if code is None:
                why = (
                    f"ran out of time after {check.seconds:.0f} s; run it again when the machine is less busy"
                )
                yield Row(check.name, "timed out", check.seconds, why, trace=trace)
            else:
                why = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                yield Row(check.name, "does not", 0.0, f"its process ended with {why}", check.remedy, trace)
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_S)
    finally:
        end_tree(process.pid)
        process.communicate()


def _result(check: Check, number: int, process: subprocess.Popen[bytes], folder: Path) -> Row | None:
    """Waits for the check's line; None where its process ends first, or the check's time."""
    deadline = monotonic() + check.seconds
    while True:
        over = process.poll() is not None or monotonic() > deadline  # before the look, which then sees all
        with suppress(FileNotFoundError):
            lines = (folder / RESULTS).read_text().split("\n")[:-1]
            if number < len(lines):
                return Row(**json.loads(lines[number]))
        if over:
            return None
        sleep(0.1)
