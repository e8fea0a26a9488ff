"""Runs checks in a process per group, and yields results, also of crashes and timeouts.

Crashes, hangs and leaked GPU memory end with the process, and affect no other check.
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
from torchgrpo.selftest.check import Check, CheckResult, Device
from torchgrpo.selftest.child import CHECKS, RESULTS, kill_process_tree, last_lines

OUTPUT = "output.txt"
EXIT_S = 60.0
"""Time for the exit of a process whose checks are done, in which Ray, vLLM and loggers clean up."""
PROJECT_FOLDER = str(Path(__file__).resolve().parents[2])
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # models are tiny
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_SILENT": "true",
}


def run_checks(checks: Sequence[Check], machine: Machine, vllm_build: Device | None) -> Iterator[CheckResult]:
    """Runs checks, and yields each result; checks that cannot run here come last."""
    missing_requirements = {check.name: check.missing_requirement(machine, vllm_build) for check in checks}
    runnable = [check for check in checks if missing_requirements[check.name] is None]
    for _, group in groupby(runnable, key=lambda check: check.group):
        yield from run_group(list(group))
    for name, reason in missing_requirements.items():
        if reason is not None:
            yield CheckResult(name, "skipped", 0.0, reason)


def run_group(checks: Sequence[Check]) -> Iterator[CheckResult]:
    """Yields a result for each check; after a crash, a new process runs the rest."""
    num_done = 0
    while num_done < len(checks):
        with tempfile.TemporaryDirectory(prefix="grpo_selftest_", ignore_cleanup_errors=True) as folder:
            for result in _run_in_one_process(checks[num_done:], Path(folder)):
                num_done += 1
                yield result


def _run_in_one_process(checks: Sequence[Check], folder: Path) -> Iterator[CheckResult]:
    """Yields results until a check crashes or exceeds its deadline, then kills the process."""
    (folder / CHECKS).write_text(json.dumps([asdict(check) for check in checks]))
    path = os.pathsep.join([PROJECT_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "torchgrpo.selftest.child", str(folder)],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            stdin=subprocess.PIPE,  # its end shows the child that this process has ended
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for number, check in enumerate(checks):
            result = _wait_for_result(check, number, process, folder)
            if result is not None:
                yield result
                continue
            trace, code = last_lines((folder / OUTPUT).read_text(errors="replace")), process.returncode
            if code is None:
                reason = f"ran out of time after {check.seconds:.0f} s; run it again when the machine is less busy"
                yield CheckResult(check.name, "timed out", check.seconds, reason, trace=trace)
            else:
                reason = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                yield CheckResult(check.name, "failed", 0.0, f"its process ended with {reason}", check.remedy, trace)
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_S)
    finally:
        kill_process_tree(process.pid)
        process.communicate()


def _wait_for_result(check: Check, number: int, process: subprocess.Popen[bytes], folder: Path) -> CheckResult | None:
    """Waits for a check's result; None if the process or the time ends first."""
    deadline = monotonic() + check.seconds
    while True:
        # Read before the file, so that the last reading of the file is complete.
        is_over = process.poll() is not None or monotonic() > deadline
        with suppress(FileNotFoundError):
            lines = (folder / RESULTS).read_text().split("\n")[:-1]
            if number < len(lines):
                return CheckResult(**json.loads(lines[number]))
        if is_over:
            return None
        sleep(0.1)
