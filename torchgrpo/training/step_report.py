"""Defines the report of an optimizer step, and gathers its per-token values from workers' outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.errors import RunError
from config.schema.policy import PolicyConfig
from torchgrpo.batches.batch import Batch
from torchgrpo.training.microbatches import Microbatch
from torchgrpo.training.worker import WorkerOutput


class NonFiniteError(RunError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class StepReport:
    """Result of an optimizer step.

    metrics: numbers to log. speed_metrics: numbers to log that depend on the machine.
    is_skipped: whether the update was skipped.
    log_ratio: float32 [N, R], log-prob of the trainer before the update less that of the engine, 0 outside the
        loss.
    entropy: float32 [N, R], entropy of the trainer's distribution in nats, 0 outside the loss.
    advantage: float32 [N, 1] or [N, R], total advantage: `policy.reward_coef` times the reward's, plus the
        teacher's.
    """

    metrics: dict[str, float]
    speed_metrics: dict[str, float]
    is_skipped: bool
    log_ratio: Tensor
    entropy: Tensor
    advantage: Tensor


def gather_token_tensors(
    policy: PolicyConfig, batch: Batch, shares: list[list[Microbatch]], outputs: Sequence[WorkerOutput]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers log-ratios, entropies and advantages of all workers' tokens into [N, R] tensors."""
    assert batch.mask is not None and batch.advantage is not None
    log_ratio, entropy = (torch.zeros(batch.mask.shape) for _ in range(2))
    has_teacher = policy.distill_coef != 0
    advantage = torch.zeros(batch.mask.shape) if has_teacher else policy.reward_coef * batch.advantage
    for share, output in zip(shares, outputs, strict=True):
        for microbatch, tokens in zip(share, output.tokens, strict=True):
            if microbatch.idle:
                continue
            mask = batch.mask[microbatch.rows]
            for result, values in (
                (log_ratio, tokens.log_ratio),
                (entropy, tokens.entropy),
                (advantage, tokens.advantage),
            ):
                if values is not None:
                    result[microbatch.rows] = torch.zeros(mask.shape).masked_scatter_(mask, values.float())
    return log_ratio, entropy, advantage
