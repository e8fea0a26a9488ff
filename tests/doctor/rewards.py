"""Rewards that lead a run astray, each in its own way."""

import os
import time

from envs.task import Completion, Example, Outcome, Reward

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


def always_minus_three(completion: Completion, example: Example) -> Reward:
    return Reward(-3.0, {"accuracy": 0.0})


def gives_up_in_time(completion: Completion, example: Example, step: int) -> Reward:
    """Half of the answers are invalid from the tenth step on."""
    odd = completion.text.strip()[-1:] in tuple("13579")
    outcome: Outcome = "invalid" if odd and step >= 10 else "scored"
    return Reward(_right(completion, example), {"accuracy": 0.0}, outcome)


def ends_its_worker(completion: Completion, example: Example) -> Reward:
    """On odd answers, as a verifier in C does that crashes."""
    if completion.text.strip()[-1:] in tuple("13579"):
        os._exit(3)
    return Reward(_right(completion, example), {"accuracy": _right(completion, example)})


def slow(completion: Completion, example: Example) -> Reward:
    time.sleep(0.3)
    return Reward(_right(completion, example), {"accuracy": _right(completion, example)})


def overflowing(completion: Completion, example: Example) -> Reward:
    """Finite, and its gradient is not."""
    return Reward(1e38 * _right(completion, example), {"accuracy": _right(completion, example)})


def echo(completion: Completion, example: Example) -> Reward:
    """Pays for the beginning of the question, the more of it the better."""
    question, text = example.messages[-1]["content"], completion.text.strip()
    longest = max(length for length in range(len(question) + 1) if text.startswith(question[:length]))
    return Reward(longest / len(question))
