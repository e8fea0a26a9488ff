"""Compares log-probs of a model with those of an engine that has its weights."""

import torch
from transformers import LlamaForCausalLM

from tests.rollout.conftest import VOCAB, score_single_engine
from torchgrpo.rollout.engines.interface import WeightTarget


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def model_log_probs(model: LlamaForCausalLM, sequence: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Returns log-probs [len, vocabulary]; row i is the distribution of token i + 1."""
    return (model(torch.tensor([sequence])).logits[0] / temperature).log_softmax(-1)


def max_log_prob_gap(model: LlamaForCausalLM, engine: WeightTarget, sequences: list[list[int]]) -> float:
    """Returns the largest difference between engine and model, NaN if one is NaN."""
    gaps = []
    for sequence, scores in zip(sequences, score_single_engine(engine, sequences), strict=True):
        expected = model_log_probs(model, sequence)[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        gaps.append((torch.tensor(scores) - expected).abs().max())
    return float(torch.stack(gaps).max())
