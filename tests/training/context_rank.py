"""Rank actor that scores rows together with the other ranks of its group, for tests."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tiny_models import tiny_llama
from torchgrpo.batches.batch import Tokens
from torchgrpo.training.context_parallel import ContextGroup, join_context_group
from torchgrpo.training.packed_sequence import pack_rows, slice_sequence
from torchgrpo.training.rank_actor import RankProcess
from torchgrpo.training.response_scorer import ResponseScorer


def exact_llama() -> LlamaForCausalLM:
    return tiny_llama().double()


def score_and_differentiate(
    tokens: Tokens, context: ContextGroup | None, checkpointing: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns log-probs, entropies and gradients of a model in float64.

    The rows have temperatures of their own.
    """
    model = exact_llama()
    if checkpointing:
        model.train().gradient_checkpointing_enable()
    scorer = ResponseScorer(model, chunk_size=3, temperature=None, context=context)
    temperature = torch.linspace(0.7, 1.3, len(tokens))[:, None].double()
    scores = scorer(tokens, temperature, with_entropy=True)
    assert scores.entropy is not None
    slope = torch.linspace(-1.0, 2.0, tokens.loss_mask.numel()).view(tokens.loss_mask.shape).double()
    (slope * scores.log_prob + slope.square() * scores.entropy).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return scores.log_prob.detach(), scores.entropy.detach(), gradients


class ContextRank(RankProcess):
    """Ray actor whose group has all ranks."""

    context: ContextGroup | None

    def join_group(self) -> None:
        self.context = join_context_group(dist.get_world_size(), self.timeout)

    def score(self, tokens: Tokens, checkpointing: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Scores rows, with gradients summed over the ranks."""
        log_prob, entropy, gradients = score_and_differentiate(tokens, self.context, checkpointing)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        return log_prob, entropy, gradients

    def count_targets(self, tokens: Tokens) -> tuple[int, int]:
        """Returns the numbers of positions and of loss tokens that this rank computes."""
        assert self.context is not None
        own, targets = slice_sequence(pack_rows(tokens), self.context, 1)
        return own.ids.shape[1], len(targets)
