"""Rewards of runs in tests, in a module of their own: every process that judges imports it, and tests import torch."""

from envs.task import Completion, Example


def digits(completion: Completion, example: Example) -> float:
    """Something that a random model can be better or worse at."""
    return float(sum(letter.isdigit() for letter in completion.text))


def never_right(completion: Completion, example: Example) -> float:
    return 0.0


def never_a_number(completion: Completion, example: Example) -> float:
    return float("nan")
