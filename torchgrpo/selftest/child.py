"""Child process of the self-test: runs a group of checks in turn and writes results.

The command is `python -m torchgrpo.selftest.child FOLDER`. The file CHECKS in FOLDER holds the checks. Each
check adds a line to the file RESULTS at its end. The process ends at the end of its stdin.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from config.cli.broken_packages import broken_package_message
from config.schema.errors import ConfigError
from torchgrpo.selftest.check import Check, CheckResult, CheckWorkspace

CHECKS, RESULTS = "checks.json", "results.jsonl"


def run_all_checks(folder: Path) -> None:
    """Runs the checks in `folder` one after another."""
    threading.Thread(target=_end_with_parent, name="watch", daemon=True).start()
    checks = [Check(**fields) for fields in json.loads((folder / CHECKS).read_text())]
    with (folder / RESULTS).open("w") as results:
        for number, check in enumerate(checks):
            faulthandler.dump_traceback_later(check.seconds / 2)  # for the trace of a hanging check
            row = run_check(check, folder / str(number))
            faulthandler.cancel_dump_traceback_later()
            gc.collect()  # frees models in reference cycles
            print(json.dumps(asdict(row)), file=results, flush=True)


def run_check(check: Check, folder: Path) -> CheckResult:
    """Runs a check in a new folder; returns its result, also for an exception."""
    folder.mkdir()
    start = time.monotonic()
    try:
        detail = check.function(CheckWorkspace(folder, check.device), **check.options)
        return CheckResult(check.name, "passed", time.monotonic() - start, detail)
    except BaseException as error:
        seconds = time.monotonic() - start
        trace = last_lines(traceback.format_exc())
        if broken := broken_package_message(error):
            return CheckResult(check.name, "failed", seconds, broken, trace=trace)
        if isinstance(error, ConfigError):  # its message names a remedy
            return CheckResult(check.name, "failed", seconds, str(error), trace=trace)
        message = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        return CheckResult(check.name, "failed", seconds, f"{type(error).__name__}: {message}", check.remedy, trace)


def last_lines(text: str) -> str:
    """Returns the last lines of a trace, for a bug report."""
    return "\n".join(text.splitlines()[-30:])


def kill_process_tree(pid: int) -> None:
    """Kills a process, its group and its descendants."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Kills this process tree at the end of stdin, whose other end the parent holds."""
    os.read(0, 1)
    kill_process_tree(os.getpid())


if __name__ == "__main__":
    run_all_checks(Path(sys.argv[1]))
