"""Rewards that misbehave, for tests that name them by import path."""

import asyncio
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import Sandbox
from envs.task import Completion, Example, Reward


def bomb(completion: Completion, example: Example) -> Reward:
    """Performs the action that the completion names; scores other completions by their length."""
    word, _, rest = completion.text.partition(" ")
    actions: dict[str, Any] = {
        "power": lambda: len(str(9**9**9)), "regex": lambda: re.fullmatch(r"(a+)+b", "a" * 60),
        "sleep": lambda: time.sleep(600), "slow": lambda: time.sleep(0.5),
        "memory": lambda: bytearray(1 << 40), "recurse": lambda: _recurse(0),
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL), "fork": os.fork,
        "fork_server": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
        "print": lambda: print("said a reward", flush=True), "exit": lambda: sys.exit(3),
        "fail": lambda: 1 / 0,
        "sandbox": lambda: Sandbox("rlimits", Limits(wall_seconds=600.0)).run("import time; time.sleep(600)"),
        "wait": lambda: _wait_for(Path(rest)), "note": lambda: Path(rest).touch(),
        "beside": lambda: (Path(rest).touch(), time.sleep(1.0)), "along": lambda: _kill_workers_together(Path(rest)),
        "child": lambda: _leave_child(Path(rest)),
    }  # fmt: skip
    if word in actions:
        actions[word]()
    scores = {"nan": math.nan, "text": "good"}
    parts = {"function": {"accuracy": _recurse}, "words": {"accuracy": "high"}}
    score: Any = scores.get(word, float(len(completion.text)))
    return Reward(score, parts.get(word, {"accuracy": 1.0}))


def die_once(completion: Completion, example: Example) -> float:
    """Kills its process for "die", and once for an empty completion.

    The file that the answer names marks the death for the empty completion.
    """
    is_first_probe = completion.text == "" and not Path(example.answer).exists()
    if is_first_probe:
        Path(example.answer).touch()
    if completion.text == "die" or is_first_probe:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def _recurse(depth: int) -> int:
    return _recurse(depth + 1) + 1


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _kill_workers_together(path: Path) -> None:
    """Kills the fork server and its workers.

    The kill waits until another worker has touched `path`, at most two seconds.
    """
    deadline = time.monotonic() + 2.0
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    path.unlink(missing_ok=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def _leave_child(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
    path.write_text(str(pid))
    time.sleep(600)


def bad_row(completion: Completion, example: Example) -> float:
    """Hangs for row 1 with any completion."""
    if example.row == 1:
        time.sleep(600)
    return 1.0


async def delayed_reward(completion: Completion, example: Example) -> float:
    await asyncio.sleep(0.001)
    return float(completion.text == example.answer)
