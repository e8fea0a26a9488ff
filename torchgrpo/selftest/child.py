"""Process of one group of checks: `python -m selftest.child FOLDER`.

FOLDER has the checks in CHECKS; each adds a line to RESULTS as it ends. The process ends with the end of its stdin.
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

from config.cli.broken_packages import broken_package
from config.schema.errors import ConfigError
from torchgrpo.selftest.check import Bench, Check, Row

CHECKS, RESULTS = "checks.json", "results.jsonl"


def run_in_turn(folder: Path) -> None:
    """Does the checks one after another."""
    threading.Thread(target=_end_with_the_parent, name="watch", daemon=True).start()
    checks = [Check(**given) for given in json.loads((folder / CHECKS).read_text())]
    with (folder / RESULTS).open("w") as results:
        for number, check in enumerate(checks):
            faulthandler.dump_traceback_later(check.seconds / 2)  # for the trace of one that hangs
            row = tried(check, folder / str(number))
            faulthandler.cancel_dump_traceback_later()
            gc.collect()  # models that are held by cycles
            print(json.dumps(asdict(row)), file=results, flush=True)


def tried(check: Check, folder: Path) -> Row:
    folder.mkdir()
    began = time.monotonic()
    try:
        detail = check.function(Bench(folder, check.device), **check.options)
        return Row(check.name, "works", time.monotonic() - began, detail)
    except BaseException as error:
        seconds = time.monotonic() - began
        trace = last_lines(traceback.format_exc())
        if broken := broken_package(error):
            return Row(check.name, "does not", seconds, broken, trace=trace)
        if isinstance(error, ConfigError):  # it names its remedy
            return Row(check.name, "does not", seconds, str(error), trace=trace)
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        return Row(check.name, "does not", seconds, f"{type(error).__name__}: {said}", check.remedy, trace)


def last_lines(text: str) -> str:
    """The end of a trace, for a bug report."""
    return "\n".join(text.splitlines()[-30:])


def end_tree(pid: int) -> None:
    """Kills the process, its group and everything below it."""
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
    for process in below:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end_with_the_parent() -> None:
    """Waits for the end of stdin, whose other end the parent holds."""
    os.read(0, 1)
    end_tree(os.getpid())


if __name__ == "__main__":
    run_in_turn(Path(sys.argv[1]))
