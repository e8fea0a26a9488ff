"""Second opinions that help, hang or fail. Not a test file."""

import os
import time
from pathlib import Path

from envs.task import Completion, Example, Reward


def half(completion: Completion, example: Example) -> Reward:
    """Right where the text says yes, and half right else; keeps a list of what it was asked about."""
    if asked := os.environ.get("ASKED"):
        with Path(asked).open("a") as lines:
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
