"""Group rewards that rank, hang, fail or lie, named by import path."""

import time
from collections.abc import Sequence

from envs.task import Completion, Example


def rank_by_length(completions: list[Completion], example: Example, scores: list[float]) -> list[float]:
    """Adds to each score the share of completions that are longer than its own."""
    lengths = [len(completion.text) for completion in completions]
    shares = [sum(other > length for other in lengths) / len(lengths) for length in lengths]
    return [score + share for score, share in zip(scores, shares, strict=True)]


def count_turns(completions: list[Completion], example: Example, scores: list[float]) -> list[float]:
    return [float(len(completion.turns)) for completion in completions]


def hang(completions: list[Completion], example: Example, scores: list[float]) -> list[float]:
    time.sleep(3600)
    return scores


def too_few(completions: list[Completion], example: Example, scores: list[float]) -> list[float]:
    return scores[1:]


def not_finite(completions: list[Completion], example: Example, scores: list[float]) -> list[float]:
    return [float("nan")] * len(scores)


def of_one_argument(completions: Sequence[Completion]) -> list[float]:
    return [0.0] * len(completions)
