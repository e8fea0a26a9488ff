"""Log-probs of whole sequences by the model's plain forward pass, without padding, packing or segments."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from torchgrpo.training.adapters import causal_model
from torchgrpo.training.log_probs import selected_log_probs
from torchgrpo.training.sharding import Within, directly
from torchgrpo.training.training_mode import evaluation_mode


@torch.no_grad()
def plain_scores(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
    within: Within = directly,
    autocast: torch.dtype | None = None,
) -> list[list[float]]:
    """Log-probs of all tokens but the first, [count][length - 1].

    Sequences of one length go through the model together. within: where the model's parameters are whole. autocast: as
    `ResponseScorer.autocast_dtype`.
    """
    causal = causal_model(model)
    scores: dict[int, list[float]] = {}
    places: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        places.setdefault(len(sequence), []).append(place)
    half = torch.autocast(causal.device.type, autocast, enabled=autocast is not None)
    with half, evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        for together in places.values():
            ids = torch.tensor([list(sequences[place]) for place in together], device=causal.device)
            log_probs = within(partial(_log_probs, causal, ids, temperature))
            scores |= dict(zip(together, log_probs.tolist(), strict=True))
    return [scores[place] for place in range(len(sequences))]


def _log_probs(causal: PreTrainedModel, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 [N, L - 1] of ids [N, L]."""
    head = causal.get_output_embeddings()
    hidden = causal.base_model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten().to(head.weight.device)
    log_probs, _ = selected_log_probs(
        hidden.to(head.weight.device), head.weight, head.bias, targets, temperature
    )
    return log_probs.view(len(ids), -1).float()
