"""Computes log-probs of each sequence's tokens by unpadded, unpacked forward passes without gradient."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from torchgrpo.training.adapters import causal_model
from torchgrpo.training.log_probs import selected_log_probs
from torchgrpo.training.sharding import UnshardedContext, compute_device, no_sharding
from torchgrpo.training.training_mode import evaluation_mode


@torch.no_grad()
def plain_log_probs(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
    unsharded_context: UnshardedContext = no_sharding,
    autocast: torch.dtype | None = None,
) -> list[list[float]]:
    """Computes log-probs of all tokens but the first, [count][length - 1].

    Sequences of equal length go through the model together. unsharded_context, autocast: as in `ResponseScorer`.
    """
    causal = causal_model(model)
    results: dict[int, list[float]] = {}
    indices_by_length: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        indices_by_length.setdefault(len(sequence), []).append(index)
    device_type = compute_device(causal.get_output_embeddings().weight).type
    half = torch.autocast(device_type, autocast, enabled=autocast is not None)
    with half, evaluation_mode(model):
        for indices in indices_by_length.values():
            ids = torch.tensor([list(sequences[index]) for index in indices])
            log_probs = unsharded_context(partial(_log_probs, causal, ids, temperature))
            results |= dict(zip(indices, log_probs.tolist(), strict=True))
    return [results[index] for index in range(len(sequences))]


def _log_probs(causal: PreTrainedModel, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Computes the log-probs float32 [N, L - 1] of ids [N, L].

    The layers run uncompiled. Uncompiled operations of a GPU's output head would hold several copies of its logits.
    """
    head, ids = causal.get_output_embeddings(), ids.to(causal.device)
    with torch.compiler.set_stance("force_eager"):
        hidden = causal.base_model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten().to(head.weight.device)
    log_probs, _ = selected_log_probs(hidden.to(head.weight.device), head.weight, head.bias, targets, temperature)
    return log_probs.view(len(ids), -1).float()
