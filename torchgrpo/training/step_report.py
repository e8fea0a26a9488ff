"""Report of one optimizer step: its metrics, and values of every token of its batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.errors import RunError
from config.schema.policy import PolicyConfig
from torchgrpo.batches.batch import Batch
from torchgrpo.training.microbatches import Microbatch
from torchgrpo.training.worker import Part


class NonFiniteError(RunError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class StepReport:
    """Outcome of an optimizer step.

    metrics: ready to log. log_ratio, entropy: float32 [N, R] of the batch, 0 outside the loss: trainer less engine
    before the update, and the entropy of the trainer's distribution, in nats. advantage: float32 [N, 1] or [N, R], with
    which it was trained on: the reward's by `policy.reward_coef`, and a teacher's.
    """

    metrics: dict[str, float]
    skipped: bool
    log_ratio: Tensor
    entropy: Tensor
    advantage: Tensor


def token_tensors(
    policy: PolicyConfig, batch: Batch, shares: list[list[Microbatch]], parts: Sequence[Part]
) -> tuple[Tensor, Tensor, Tensor]:
    """Put the tokens' log-ratios, entropies and advantages of all workers back into [N, R]."""
    assert batch.mask is not None and batch.advantage is not None
    log_ratio, entropy = (torch.zeros(batch.mask.shape) for _ in range(2))
    taught = policy.distill_coef != 0
    advantage = torch.zeros(batch.mask.shape) if taught else policy.reward_coef * batch.advantage
    for share, part in zip(shares, parts, strict=True):
        for piece, tokens in zip(share, part.tokens, strict=True):
            if piece.idle:
                continue
            mask = batch.mask[piece.rows]
            for whole, values in (
                (log_ratio, tokens.log_ratio),
                (entropy, tokens.entropy),
                (advantage, tokens.advantage),
            ):
                if values is not None:
                    whole[piece.rows] = torch.zeros(mask.shape).masked_scatter_(mask, values.float().cpu())
    return log_ratio, entropy, advantage
