"""What runs in the process of one check."""

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

from config.errors import ConfigError
from selftest.check import Bench, Check

OUTCOME, OUTPUT = "outcome.json", "output.txt"
_DUMP_S = 2.0  # before the deadline, so that the stacks are there when the process is killed


def work(check: Check, folder: Path, seconds: float) -> None:
    """Do the check and leave OUTCOME in `folder`, beside OUTPUT with all that was printed.

    seconds: that it has; shortly before, the stacks of all threads are written to OUTPUT.
    """
    os.setsid()  # the process group that the runner ends with it
    with (folder / OUTPUT).open("w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        faulthandler.enable(output)
        faulthandler.dump_traceback_later(max(seconds - _DUMP_S, seconds / 2), file=output)
        _leave(folder, _tried(check, folder))
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        sys.stdout.flush()


def _tried(check: Check, folder: Path) -> dict[str, str]:
    bench_folder = folder / "bench"
    bench_folder.mkdir()
    try:
        import selftest.preload  # noqa: F401  a fresh process has not got its environment from the server

        return {
            "status": "works",
            "detail": check.function(Bench(bench_folder, check.device), **check.options),
        }
    except ConfigError as error:  # which names its remedy
        return {"status": "does not", "detail": str(error), "trace": traceback.format_exc(), "remedy": ""}
    except BaseException as error:
        said = f"{type(error).__name__}: {str(error) or traceback.extract_tb(error.__traceback__)[-1].line}"
        return {"status": "does not", "detail": said, "trace": traceback.format_exc(), "remedy": check.remedy}


def _leave(folder: Path, outcome: dict[str, str]) -> None:
    beside = folder / f"{OUTCOME}.tmp"
    beside.write_text(json.dumps(outcome))
    beside.replace(folder / OUTCOME)
