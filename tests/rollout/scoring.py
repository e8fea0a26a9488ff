"""What a model and an engine that has its weights say of the same sequences."""

import torch
from transformers import LlamaForCausalLM

from tests.rollout.conftest import VOCAB, scores_of_one
from torchgrpo.rollout.engines.interface import WeightTarget


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def log_probs(model: LlamaForCausalLM, sequence: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len, vocabulary]: row i is the distribution of token i + 1."""
    return (model(torch.tensor([sequence])).logits[0] / temperature).log_softmax(-1)


def far(model: LlamaForCausalLM, engine: WeightTarget, sequences: list[list[int]]) -> float:
    """Largest difference between the engine's scores and the model's."""
    worst = 0.0
    for sequence, scores in zip(sequences, scores_of_one(engine, sequences), strict=True):
        expected = log_probs(model, sequence)[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(scores) - expected).abs().max()))
    return worst
