"""Fake checks that pass, fail, hang or crash, for tests of the self-test's runner.

The module imports no slow package.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from config.schema.errors import ConfigError
from torchgrpo.selftest.check import Check, CheckWorkspace
from torchgrpo.selftest.runner import run_group


def works(workspace: CheckWorkspace, number: int = 0) -> str:
    (workspace.folder / "a file").touch()
    print("not for the user")
    return f"number {number} in {os.getpid()}"


def fails(workspace: CheckWorkspace) -> str:
    raise ArithmeticError("the sum is wrong")


def fails_in_silence(workspace: CheckWorkspace) -> str:
    assert workspace.device == "no such device"
    return ""


def refuses(workspace: CheckWorkspace) -> str:
    raise ConfigError("ray.address=nowhere: no cluster; leave it unset")


def dies(workspace: CheckWorkspace) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "unreachable"


def hangs(workspace: CheckWorkspace, pid_file: str) -> str:
    """Writes its pid and that of a child process in another session, then waits forever."""
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    child = subprocess.Popen(command, start_new_session=True)
    partial_file = Path(f"{pid_file}.part")
    partial_file.write_text(f"{os.getpid()} {child.pid}")
    partial_file.rename(pid_file)
    threading.Event().wait()
    return "unreachable"


if __name__ == "__main__":
    # A shell that starts the tests in the background makes them, and this process, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    list(run_group([Check("hangs", "tests.fake_checks.hangs", {"pid_file": sys.argv[1]})]))
