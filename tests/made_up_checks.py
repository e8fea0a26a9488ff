"""Bodies of checks that work, fail, hang and die, for the self-test's runner. They import nothing heavy."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from config.errors import ConfigError
from plan.machine import this_machine
from selftest.check import Bench, Check
from selftest.runner import fresh, run_checks


def works(bench: Bench, number: int = 0) -> str:
    (bench.folder / "a file").touch()
    print("not for the user")
    return f"number {number}"


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


def exits(bench: Bench) -> str:
    os._exit(3)


def works_and_does_not_end(bench: Bench) -> str:
    threading.Thread(target=threading.Event().wait).start()
    return "done"


def hangs_with_a_child(bench: Bench, noted: str) -> str:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    Path(noted).write_text(f"{os.getpid()} {child.pid}")
    threading.Event().wait()
    return "unreachable"


def parent(bench: Bench) -> str:
    return " ".join([str(os.getppid()), *sys.modules])


def hang(noted: str) -> None:
    """Tries a check that hangs, until this process is interrupted."""
    check = Check("hangs", "tests.made_up_checks.hangs_with_a_child", {"noted": noted}, seconds=300)
    run_checks([check, check], this_machine(Path()), None, lambda row: None, fresh())


if __name__ == "__main__":
    # A shell that starts the tests in the background has them ignore the interrupt, and this process with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang(sys.argv[1])
