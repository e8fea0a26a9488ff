"""Misleading rewards for tests of the diagnostics."""

from envs.task import Completion, Example, Reward


def form_alone(completion: Completion, example: Example) -> Reward:
    """Rewards a leading 9 regardless of the sum."""
    form = float(completion.text.strip().startswith("9"))
    return Reward(form, {"accuracy": float(completion.text.strip() == str(example.answer)), "form": form})


def always_minus_three(completion: Completion, example: Example) -> Reward:
    return Reward(-3.0, {"accuracy": 0.0})
