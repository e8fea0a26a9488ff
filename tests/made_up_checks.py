"""Bodies of checks that work, fail, hang and die, for the runner of the self-test. They import nothing heavy."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from config.schema.errors import ConfigError
from torchgrpo.selftest.check import Bench, Check
from torchgrpo.selftest.runner import run_group


def works(bench: Bench, number: int = 0) -> str:
    (bench.folder / "a file").touch()
    print("not for the user")
    return f"number {number} in {os.getpid()}"


def fails(bench: Bench) -> str:
    raise ArithmeticError("the sum is wrong")


def fails_in_silence(bench: Bench) -> str:
    assert bench.device == "no such device"
    return ""


def refuses(bench: Bench) -> str:
    raise ConfigError("ray.address=nowhere: no cluster; leave it unset")


def dies(bench: Bench) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "unreachable"


def hangs(bench: Bench, noted: str) -> str:
    """Notes its process and one below it, which is in a session of its own."""
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    child = subprocess.Popen(command, start_new_session=True)
    part = Path(f"{noted}.part")
    part.write_text(f"{os.getpid()} {child.pid}")
    part.rename(noted)
    threading.Event().wait()
    return "unreachable"


if __name__ == "__main__":
    # A shell that starts the tests in the background has them ignore the interrupt, and this process with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    list(run_group([Check("hangs", "tests.made_up_checks.hangs", {"noted": sys.argv[1]})]))
