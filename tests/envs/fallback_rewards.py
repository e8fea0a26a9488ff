"""Fallback rewards that help, hang or fail, for tests that name them by import path."""

import os
import time
from pathlib import Path

from envs.task import Completion, Example, Reward


def half(completion: Completion, example: Example) -> Reward:
    """Scores a text with "yes" as right and any other as half right.

    It appends the texts to the file that the variable ASKED names.
    """
    if log_file := os.environ.get("ASKED"):
        with Path(log_file).open("a") as lines:
            lines.write(f"{completion.text}\n")
    right = "yes" in completion.text
    return Reward(3.0 if right else 0.5, {"accuracy": float(right)})


def hang(completion: Completion, example: Example) -> float:
    time.sleep(3600)
    return 1.0


def spin(completion: Completion, example: Example) -> float:
    return float(9 ** (9**9) > 0)


def die(completion: Completion, example: Example) -> float:
    os._exit(3)


def fail(completion: Completion, example: Example) -> float:
    raise ValueError("no opinion")


def eat(completion: Completion, example: Example) -> float:
    return float(len(bytearray(1 << 40)))
