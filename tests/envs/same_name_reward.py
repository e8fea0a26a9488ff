"""Second reward named `brief`, for tests of equal names."""

from envs.task import Completion, Example


def brief(completion: Completion, example: Example) -> float:
    return 0.0
