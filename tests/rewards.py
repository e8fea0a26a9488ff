"""Rewards of test runs, in a module without torch for the reward workers."""

from envs.task import Completion, Example


def digits(completion: Completion, example: Example) -> float:
    """Returns the number of digits, which varies for a random model."""
    return float(sum(letter.isdigit() for letter in completion.text))


def never_right(completion: Completion, example: Example) -> float:
    return 0.0


def never_a_number(completion: Completion, example: Example) -> float:
    return float("nan")


def scheduled_reward(completion: Completion, step: int, total_steps: int) -> float:
    """Returns the number of digits times the run's progress, less at the beginning."""
    digits = sum(letter.isdigit() for letter in completion.text)
    return digits * step / total_steps - 3.0 * (step < 2)


def steps_done(completion: Completion, step: int, total_steps: int) -> float:
    return step / total_steps
