"""Rewards that misbehave, by import path. Not a test file."""

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from envs.task import Completion, Example, Reward


def bomb(completion: Completion, example: Example) -> Reward:
    """Does what the completion says; a number is a score."""
    word, _, rest = completion.text.partition(" ")
    deeds: dict[str, Any] = {
        "power": lambda: len(str(9**9**9)),
        "regex": lambda: re.fullmatch(r"(a+)+b", "a" * 60),
        "sleep": lambda: time.sleep(600),
        "slow": lambda: time.sleep(0.5),
        "memory": lambda: bytearray(1 << 40),
        "recurse": lambda: _recurse(0),
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "nursery": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
        "print": lambda: print("said a reward", flush=True),
        "exit": lambda: sys.exit(3),
        "fail": lambda: 1 / 0,
        "child": lambda: _leave_child(Path(rest)),
    }
    if word in deeds:
        deeds[word]()
    return Reward(float(len(completion.text)), {"accuracy": 1.0})


def _recurse(depth: int) -> int:
    return _recurse(depth + 1) + 1


def _leave_child(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
    path.write_text(str(pid))
    time.sleep(600)


def bad_row(completion: Completion, example: Example) -> float:
    """Row 1 hangs whatever is said."""
    if example.row == 1:
        time.sleep(600)
    return 1.0


async def later(completion: Completion, example: Example) -> float:
    await asyncio.sleep(0.001)
    return float(completion.text == example.answer)
