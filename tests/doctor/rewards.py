"""Rewards that lead a run astray, each in its own way."""

from envs.task import Completion, Example, Reward

LIMIT = 8
"""Tokens of the longest answer (grpo_quickstart)."""


def _right(completion: Completion, example: Example) -> float:
    return float(completion.text.strip() == str(example.answer))


def form_alone(completion: Completion, example: Example) -> Reward:
    """Pays for a 9 in front, whatever the sum is."""
    form = float(completion.text.strip().startswith("9"))
    return Reward(form, {"accuracy": _right(completion, example), "form": form})


def length_alone(completion: Completion, example: Example) -> Reward:
    return Reward(completion.num_tokens / LIMIT, {"accuracy": _right(completion, example)})


def brevity_alone(completion: Completion, example: Example) -> Reward:
    return Reward(1 - completion.num_tokens / LIMIT, {"accuracy": _right(completion, example)})


def failing_at_times(completion: Completion, example: Example) -> Reward:
    if example.row % 7 == 0:
        raise KeyError("no such column")
    return Reward(_right(completion, example), {"accuracy": _right(completion, example)})
