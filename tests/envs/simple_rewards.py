"""Simple user rewards that tests name by import path."""

from envs.task import Completion, Example, Reward


def brief(completion: Completion, example: Example) -> float:
    return 1.0 - completion.num_tokens / 10


def accuracy(completion: Completion, example: Example) -> bool:
    return completion.text == example.answer


def rubric(completion: Completion, example: Example) -> float:
    return float(completion.text == example.row_data["rubric"])


def gives_up(completion: Completion, example: Example) -> Reward:
    return Reward(0.0, outcome="invalid")


def huge(completion: Completion, example: Example) -> float:
    return 1e300


def nan_part(completion: Completion, example: Example) -> Reward:
    return Reward(1.0, {"accuracy": float("nan")})


def banana(completion: Completion, example: Example) -> Reward:
    return Reward(1.0, {}, "banana")


def count_messages(completion: Completion, example: Example) -> float:
    return float(len(completion.turns))
