"""The scorer that tests share, and a batch of the tiny model's own groups. Not a test file."""

import torch

from tests.groups import drawn_from_tiny
from training.batch import Batch, collate
from training.forward import ResponseScorer

REPEATS = 4


def collected(temperature: float = 1.0, num_groups: int = 6) -> Batch:
    """Groups with prompts and responses of unequal length, sampled by the real engine."""
    return collate(drawn_from_tiny(temperature, num_groups, REPEATS))


def scorer(model: torch.nn.Module, share_prompt: bool, temperature: float | None = 1.0) -> ResponseScorer:
    return ResponseScorer(model, REPEATS, share_prompt, chunk_size=7, temperature=temperature)
