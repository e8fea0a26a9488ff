"""Agents of a user for the tests: functions, and a program with tricks.

python user_agents.py TRICK ARGS...
"""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from envs.example import Example

OWN_FILE = str(Path(__file__).resolve())


def returns_nothing(example: Example) -> None:
    print("done")


def returns_number(example: Example) -> int:
    return len(example.messages)


async def returns_components(example: Example) -> tuple[float, dict[str, float]]:
    await asyncio.sleep(0)
    return np.float32(0.5), {"row": example.row}


def returns_dictionary(example: Example) -> dict[str, Any]:
    return {"reward": 1, "components": {"columns": len(example.row_data)}}


def returns_bool(example: Example) -> bool:
    return True


def raises(example: Example) -> None:
    print("before the end", file=sys.stderr)
    raise LookupError(f"row {example.row}")


def exits(example: Example) -> None:
    os._exit(0)


def forges_report(example: Example) -> None:
    """Writes a report of its own to every pipe that it finds, and ends."""
    report = b"[" * 20_000 if example.row else b"[1.0]"
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if descriptor > 2 and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, report)
    os._exit(0)


def aborts(example: Example) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forks(example: Example) -> float:
    if os.fork() == 0:
        return 1.0
    time.sleep(0.05)
    return 0.25


def sees(example: Example) -> float:
    """Writes what the function can read to the file OUTPUT."""
    seen = {
        "example": repr(example),
        "variables": dict(os.environ),
        "start": Path("/proc/self/environ").read_text(),
        "folder": os.getcwd(),
    }
    Path(os.environ["OUTPUT"]).write_text(json.dumps(seen))
    return float(np.random.default_rng().random())


def random_number(example: Example) -> float:
    return float(np.random.random())


def sleeps(example: Example) -> NoReturn:
    write_ready()
    hang()


def hang() -> NoReturn:
    while True:
        time.sleep(3600)


def write_ready() -> None:
    """Reports to the test, by the file READY, that all processes run."""
    with open(os.environ["READY"], "a") as file:
        file.write("x")


def fork_child() -> bool:
    """Forks a child; returns whether this is the child."""
    return os.fork() == 0


def trick(name: str, *arguments: str) -> None:
    """Performs the trick of a name."""
    if name == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        write_ready()
        hang()
    elif name == "daemon":  # detached twice, without streams, deaf to SIGTERM
        if fork_child():
            os.setsid()
            if fork_child():
                for stream in range(3):
                    os.close(stream)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                Path(os.environ["TMPDIR"], "of_daemon").write_text("x")
                write_ready()
                hang()
            os._exit(0)
        os.wait()
        while not Path(os.environ["READY"]).exists():
            time.sleep(0.01)
        if arguments:
            hang()
        print(json.dumps({"reward": 1.0}))
    elif name == "closed_streams":
        for stream in range(3):
            os.close(stream)
        write_ready()
        hang()
    elif name == "bomb":  # bounded, so that a failure of the test harms nothing
        for _ in range(600):
            if fork_child():
                hang()
        hang()
    elif name == "tree":  # doubles in each round
        for _ in range(9):
            os.fork()
        hang()
    elif name == "flood":
        while True:
            os.write(int(arguments[0]), b"spam " * 10_000)
    elif name == "files":
        folder = os.environ["TMPDIR"]
        for _ in range(1500):  # deeper than Python's recursion and than the longest path
            os.mkdir(os.path.join(folder, "nested"))
            os.chdir(os.path.join(folder, "nested"))
            folder = "."
    elif name == "children":
        subprocess.Popen([sys.executable, OWN_FILE, "hang"])
        while not Path(os.environ["READY"]).exists():
            time.sleep(0.01)
        print(json.dumps({"reward": 0.5, "components": {"children": 1}}))
    elif name == "kill_parent":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGTERM)
        print(json.dumps({"reward": 0.5}))
    elif name == "proc":
        names = [name for name in os.listdir("/proc") if name.isdigit()]
        umount = subprocess.run(["umount", "/proc"], capture_output=True).returncode
        Path(os.environ["OUTPUT"]).write_text(json.dumps({"names": names, "umount": umount}))


if __name__ == "__main__":
    trick(*sys.argv[1:])
