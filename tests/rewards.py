"""Rewards of runs in tests, in a module of their own: every process that judges imports it, and tests import torch."""

from envs.task import Completion, Example


def digits(completion: Completion, example: Example) -> float:
    """Something that a random model can be better or worse at."""
    return float(sum(letter.isdigit() for letter in completion.text))


def never_right(completion: Completion, example: Example) -> float:
    return 0.0


def never_a_number(completion: Completion, example: Example) -> float:
    return float("nan")


def scheduled(completion: Completion, step: int, total_steps: int) -> float:
    """Below zero at first, and more for digits the longer the run."""
    digits = sum(letter.isdigit() for letter in completion.text)
    return digits * step / total_steps - 3.0 * (step < 2)


def steps_done(completion: Completion, step: int, total_steps: int) -> float:
    return step / total_steps
