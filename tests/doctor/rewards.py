"""Rewards that lead a run astray, each in its own way."""

from envs.task import Completion, Example, Reward


def form_alone(completion: Completion, example: Example) -> Reward:
    """Pays for a 9 in front, whatever the sum is."""
    form = float(completion.text.strip().startswith("9"))
    return Reward(form, {"accuracy": float(completion.text.strip() == str(example.answer)), "form": form})


def always_minus_three(completion: Completion, example: Example) -> Reward:
    return Reward(-3.0, {"accuracy": 0.0})
