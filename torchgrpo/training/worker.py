"""One process's part of a learner: the policy, whole or its shards, and the optimizer of these.

share of a step: microbatch ─▶ loss over the global batch ─▶ backward, each in turn ─▶ clip ─▶ finite? ─▶ optimizer

What groups are worth, who gets which of them and what is logged is the learner's (`training/learner.py`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.schema.config import Config
from torchgrpo.batches.batch import Batch
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.checkpoint_tensors import copied, read_tensors, saved_shapes, write_tensors
from torchgrpo.training.grpo_loss import GRPOLoss
from torchgrpo.training.host_states import HostStates
from torchgrpo.training.learner_models import Models
from torchgrpo.training.learner_state import (
    check_same_tensors,
    learner_tensors,
    load_step_counts,
    optimizer_tensors,
    step_counts,
)
from torchgrpo.training.loss_metrics import Metrics, effective_sample_size_by_age, merge_metrics
from torchgrpo.training.optimizer import go_to_step, make_optimizer, make_scheduler
from torchgrpo.training.process import release_memory
from torchgrpo.training.published_weights import PolicyTensor, PolicyWeights
from torchgrpo.training.sharding import Sharded, local, norm
from torchgrpo.training.trained_parameters import base_digest, check_same_model, described
from torchgrpo.training.training_mode import set_training_mode


@dataclass(frozen=True)
class Piece:
    """A microbatch, and what the aggregations need to know of the global batch.

    entropy_coef: of this step. teaches: false where its gradient is zero, so that it goes through the model without a
    backward pass.
    """

    batch: Batch
    totals: BatchTotals
    entropy_coef: float
    teaches: bool = True


@dataclass(frozen=True)
class TokenScores:
    """Values of a microbatch's tokens in the loss, [M] float32 each, row by row.

    log_ratio: trainer less engine, before the update. entropy: of the trainer's distribution over the vocabulary.
    advantage: that the loss was computed with, where a teacher is part of it; None: it is that of the batch.
    """

    log_ratio: Tensor
    entropy: Tensor
    advantage: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """What one worker's share of an optimizer step gave.

    positions: that went through the model, padding included.
    metrics: accumulators, which add up over workers. tokens: of every piece.
    """

    positions: int
    metrics: Metrics
    tokens: list[TokenScores]


@dataclass(frozen=True)
class Update:
    """What became of the gradients of an optimizer step, the same for every worker.

    lr: that it was made with. grad_norm: of all workers' gradients together, before clipping. applied: loss and
    gradient were finite. overflow: they were not because the scale of float16 gradients was too high, which it no
    longer is.
    """

    lr: float
    grad_norm: float
    applied: bool
    overflow: bool


class Worker(PolicyWeights):
    """Owns the policy and its optimizer, or one rank's shards of both.

    objective: the loss of this worker's share whose gradients are there. pushed: see `PolicyWeights`.
    """

    def __init__(self, config: Config, models: Models, pushed: Callable[[Any], list[PolicyTensor]]) -> None:
        super().__init__(models.policy, pushed, models.within)
        self.config = config
        self.scorer = models.scorer
        self.reference = models.reference
        self.base = base_digest(self.model)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config.optimizer, config.total_optimizer_steps)
        self.states = _host_states(self) if config.train_model.offload == "optimizer" else None
        self.scaler = torch.amp.GradScaler(enabled=config.train.mixed_precision == "fp16")
        self.objective = torch.zeros(())
        set_training_mode(self.model)
        self.loss = GRPOLoss(self.scorer, config.policy)

    @torch.no_grad()
    def log_prob(self, parts: Sequence[Batch]) -> list[Tensor]:
        """The policy's log-probs [n, R] of each part."""
        return [self.scorer(part.tokens, part.temperature).log_prob for part in parts]

    @torch.no_grad()
    def scores(self, parts: Sequence[Batch]) -> list[Tensor]:
        """The policy's log-probs and the entropies of its distributions [n, R, 2] of each part."""
        scored = [self.scorer(part.tokens, part.temperature, with_entropy=True) for part in parts]
        return [torch.stack([one.log_prob, _known(one.entropy)], dim=2) for one in scored]

    def reference_log_prob(self, parts: Sequence[Batch]) -> list[Tensor]:
        """The reference's log-probs [n, R] of each part."""
        assert self.reference is not None
        return self.reference.log_prob(parts)

    def begin_step(self) -> None:
        """Forget the gradients of a step that was given up."""
        self.optimizer.zero_grad(set_to_none=True)
        self.objective = torch.zeros(())

    def gradients(self, pieces: Iterable[Piece]) -> Part:
        """Add the gradients of some microbatches, as many for every worker, to those of the step."""
        parts: list[Part] = []
        for piece in pieces:
            metrics, scores = self._learn(piece)
            parts.append(Part(self.scorer.positions(piece.batch.tokens), metrics, [scores]))
        part = merge_parts(parts)
        self.objective = self.objective + part.metrics["loss/objective"]
        return part

    def update(self) -> Update:
        """The step itself, from the gradients that are there."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        with self.phase("clip"):
            self.scaler.unscale_(self.optimizer)
            limit = self.config.optimizer.clip_grad_norm or float("inf")
            grad_norm = clip_gradients(list(self.model.parameters()), limit)
        finite = bool(self._over_workers(self.objective).isfinite().all())
        applied = finite and math.isfinite(grad_norm)
        with self.phase("optimizer step"):
            if applied:
                with nullcontext() if self.states is None else self.states.visit():
                    self.scaler.step(self.optimizer)
                self.scheduler.step()
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        overflow = finite and not applied and self.scaler.is_enabled()
        return Update(lr, grad_norm, applied, overflow)

    def release_memory(self) -> None:
        """See `Learner.release_memory`."""
        release_memory()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Entered around `forward`, `backward`, `clip` and `optimizer step`, where a subclass measures."""
        return nullcontext()

    def _learn(self, piece: Piece) -> tuple[Metrics, TokenScores]:
        """Adds the gradients of a microbatch to those there; its loss, which keeps memory, does not outlive this."""
        with torch.set_grad_enabled(piece.teaches), self.phase("forward"):
            loss, metrics, scores = self._loss(piece)
        if piece.teaches:
            with self.phase("backward"):
                self._backward(loss)
        return metrics, scores

    def _loss(self, piece: Piece) -> tuple[Tensor, Metrics, TokenScores]:
        """The loss, its metrics, and what is known of every token in it."""
        batch = piece.batch
        out = self.loss(batch, piece.totals, piece.entropy_coef)
        metrics, log_ratio = self._off_policy(batch, out["log_prob"])
        assert batch.mask is not None
        mask = batch.mask.to(log_ratio.device)
        taught = self.config.policy.distill_coef != 0
        scores = TokenScores(log_ratio, out["entropy"][mask], out["advantage"][mask] if taught else None)
        return self.loss.total(out), dict(out["metrics"].items()) | metrics, scores

    def _backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _off_policy(self, batch: Batch, log_prob: Tensor) -> tuple[Metrics, Tensor]:
        """Effective sample sizes by age, and the log-ratio trainer / engine [M] of every token in the loss."""
        assert batch.mask is not None
        device = log_prob.device
        sample, mask = batch.sample_log_prob.to(device), batch.mask.to(device)
        before = log_prob if batch.old_log_prob is None else batch.old_log_prob.to(device)
        metrics: Metrics = {}
        if batch.age is not None:
            oldest = self.config.train.max_policy_age
            metrics = effective_sample_size_by_age(before, sample, batch.age.to(device), mask, oldest)
        return metrics, (before - sample)[mask]

    def _over_workers(self, value: Tensor) -> Tensor:
        """The sum over all workers, who together have one sharded model. A process group alone says nothing: an engine
        in this process makes one of its own."""
        if not isinstance(self._within, Sharded):
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def save(self, folder: Path, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
        """As `Learner.save`, of this worker's part.

        group: of all workers, for nothing else; None: this is the only one.
        """
        tensors = learner_tensors(self.model, self.optimizer)
        kept = copied(tensors) if self.config.train.async_checkpoint else tensors
        return partial(write_tensors, folder, kept, group)

    def numbers(self) -> dict[str, Any]:
        """As `Learner.numbers`, the same for every worker."""
        return {
            **described(self.model, self.base),
            "step_counts": step_counts(self.model, self.optimizer),
            "schedule_step": self.scheduler.last_epoch,
            "scaler": self.scaler.state_dict(),
        }

    def load(self, folder: Path, numbers: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
        """As `Learner.load`, this worker's part. group: as for `save`."""
        shapes = saved_shapes(folder)
        check_same_model(self.model, self.base, numbers, shapes)
        tensors = learner_tensors(self.model, self.optimizer)
        check_same_tensors(tensors, shapes)
        read_tensors(folder, tensors, group)
        load_step_counts(self.model, self.optimizer, numbers["step_counts"])
        go_to_step(self.scheduler, numbers["schedule_step"])
        if self.scaler.is_enabled() and numbers["scaler"]:
            self.scaler.load_state_dict(numbers["scaler"])


def merge_parts(parts: Sequence[Part]) -> Part:
    """Join the parts of one worker's microbatches, in their order."""
    return Part(
        sum(part.positions for part in parts),
        merge_metrics([part.metrics for part in parts]),
        [scores for part in parts for scores in part.tokens],
    )


def _known(value: Tensor | None) -> Tensor:
    assert value is not None  # it was asked for
    return value


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """The norm of all gradients together, on every worker the same, to `limit` at most from now on.

    Returns the norm before. It is float32 (float64 for float64 gradients): bfloat16 would keep three digits of it.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = norm(gradients)
    found = float(total)
    if not found < limit - SLACK:  # else every gradient would be multiplied by one
        factor = (limit / (total + 1e-6)).clamp(max=1.0)  # as `torch.nn.utils.clip_grad_norm_`
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return found


SLACK = 1e-5
"""More than what clipping adds to the norm that it divides by."""


def _host_states(worker: Worker) -> HostStates:
    """Those of its optimizer, on the host from now on."""
    device = next(parameter.device for parameter in worker.model.parameters())
    states = HostStates(partial(optimizer_tensors, worker.model, worker.optimizer), device)
    with states.visit():  # they are made here if the optimizer has not stepped yet
        return states
