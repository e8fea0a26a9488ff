"""Worker of one process: owns policy and optimizer, computes gradients, updates, saves and loads.

share of a step: microbatch ─▶ loss over the global batch ─▶ backward, each in turn ─▶ clip ─▶ finite? ─▶ optimizer

Advantages, the partition of a batch and metrics are the learner's (`training/learner.py`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from config.schema.config import Config
from torchgrpo.batches.batch import Batch
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.checkpoint_tensors import copy_to_cpu, read_tensors, saved_shapes, write_tensors
from torchgrpo.training.device_copy import copy_to_device
from torchgrpo.training.grpo_loss import GRPOLoss
from torchgrpo.training.learner_models import LearnerModels
from torchgrpo.training.learner_state import (
    check_same_tensors,
    learner_tensors,
    load_step_counts,
    optimizer_tensors,
    step_counts,
)
from torchgrpo.training.loss_metrics import Metrics, effective_sample_size_by_age, merge_metrics
from torchgrpo.training.optimizer import make_optimizer, make_scheduler, set_schedule_step
from torchgrpo.training.optimizer_offload import OffloadedStates
from torchgrpo.training.process_setup import release_memory, take_peak_bytes
from torchgrpo.training.published_weights import PolicyTensor, PolicyWeights
from torchgrpo.training.sharding import ShardedModel, global_norm, local_shard
from torchgrpo.training.trained_parameters import base_digest, check_same_model, describe_model
from torchgrpo.training.training_mode import set_training_mode

HOST = torch.device("cpu")


@dataclass(frozen=True)
class MicrobatchTask:
    """A microbatch, and the totals of the global batch that its aggregation needs.

    entropy_coef: entropy coefficient of this step. has_gradient: false where the gradient is zero, so that
    the microbatch goes through the model without a backward pass.
    """

    batch: Batch
    totals: BatchTotals
    entropy_coef: float
    has_gradient: bool = True


@dataclass(frozen=True)
class TokenScores:
    """Values of the tokens of a microbatch in the loss, [M] float32 each.

    The tokens are in the order of the rows. log_ratio: log-ratio trainer / engine, before the update.
    entropy: of the trainer's distribution over the vocabulary. advantage: the advantage in the loss, where a
    teacher is part of it; None: the advantage of the batch.
    """

    log_ratio: Tensor
    entropy: Tensor
    advantage: Tensor | None = None


@dataclass(frozen=True)
class WorkerOutput:
    """Output of one worker's share of an optimizer step.

    positions: positions that went through the model, padding included. metrics: accumulators, which are
    summed over workers. tokens: scores of every microbatch. peak_bytes: most GPU memory that the worker's process had
    allocated since its previous output; 0 on a CPU.
    """

    positions: int
    metrics: Metrics
    tokens: list[TokenScores]
    peak_bytes: int = 0


@dataclass(frozen=True)
class UpdateResult:
    """Result of an optimizer step, the same for every worker.

    lr: learning rate of the step. grad_norm: norm of all workers' gradients together, before clipping.
    is_applied: loss and gradient were finite. overflow: the gradients were not finite because the loss scale
    of float16 was too high; the scale has been lowered.
    """

    lr: float
    grad_norm: float
    is_applied: bool
    overflow: bool


class Worker(PolicyWeights):
    """Owns the policy and its optimizer, or one rank's shards of both.

    objective: the loss of this worker's microbatches since `begin_step`. tensor_source: see `PolicyWeights`.
    """

    def __init__(
        self, config: Config, models: LearnerModels, tensor_source: Callable[[Any], list[PolicyTensor]]
    ) -> None:
        super().__init__(models.policy, tensor_source, models.unsharded_context)
        self.config = config
        self.scorer = models.scorer
        self.reference = models.reference
        self.base = base_digest(self.model)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config.optimizer, config.total_optimizer_steps)
        self.offloaded_states = _offload_optimizer_states(self) if config.train_model.offload == "optimizer" else None
        self.scaler = torch.amp.GradScaler(enabled=config.train.mixed_precision == "fp16")
        self.objective = torch.zeros(())
        self._outputs: list[WorkerOutput] = []
        set_training_mode(self.model)
        self.loss = GRPOLoss(self.scorer, config.policy)

    @torch.no_grad()
    def log_prob(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Returns the policy's log-probs [n, R] of each batch, on the host."""
        return copy_to_device([self.scorer(one.tokens, one.temperature).log_prob for one in batches], HOST)

    @torch.no_grad()
    def log_prob_and_entropy(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Returns the policy's log-probs and entropies [n, R, 2] of each batch, on the host."""
        scored = [self.scorer(one.tokens, one.temperature, with_entropy=True) for one in batches]
        return copy_to_device(
            [torch.stack([one.log_prob, _require_tensor(one.entropy)], dim=2) for one in scored], HOST
        )

    def reference_log_prob(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Returns the reference's log-probs [n, R] of each batch, on the host."""
        assert self.reference is not None
        return copy_to_device(self.reference.log_prob(batches), HOST)

    def begin_step(self) -> None:
        """Discards the gradients and outputs of an unfinished step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.objective = torch.zeros(())
        self._outputs.clear()

    def gradients(self, tasks: Iterable[MicrobatchTask]) -> None:
        """Adds the gradients of some microbatches to those of the step.

        Every worker gets the same number of microbatches. Nothing is read from the GPU, so that the host prepares
        a microbatch while the GPU computes earlier ones.
        """
        for task in tasks:
            metrics, scores = self._accumulate_gradients(task)
            self._outputs.append(WorkerOutput(self.scorer.count_positions(task.batch.tokens), metrics, [scores]))
            self.objective = self.objective + metrics["loss/objective"]

    def take_output(self) -> WorkerOutput:
        """Returns the output of the step's microbatches on the host, and forgets it."""
        output = copy_to_device(merge_outputs(self._outputs), HOST)
        self._outputs.clear()
        return replace(output, peak_bytes=take_peak_bytes(self.scorer.device))

    def update(self) -> UpdateResult:
        """Clips the accumulated gradients and makes the optimizer step if they are finite."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        with self.phase("clip"):
            self.scaler.unscale_(self.optimizer)
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            norm, objective = global_norm(gradients), self._sum_over_workers(self.objective)
            # Read together, so that the host waits for the device once.
            numbers = torch.stack([norm.double(), objective.double().sum().to(norm.device)]).cpu()
            grad_norm, finite = float(numbers[0]), math.isfinite(float(numbers[1]))
            clip_gradients(gradients, norm, grad_norm, self.config.optimizer.clip_grad_norm or float("inf"))
        is_applied = finite and math.isfinite(grad_norm)
        with self.phase("optimizer step"):
            if is_applied:
                with nullcontext() if self.offloaded_states is None else self.offloaded_states.on_device():
                    self.scaler.step(self.optimizer)
                self.scheduler.step()
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        overflow = finite and not is_applied and self.scaler.is_enabled()
        return UpdateResult(lr, grad_norm, is_applied, overflow)

    def release_memory(self) -> None:
        """See `Learner.release_memory`."""
        release_memory()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Context of `forward`, `backward`, `clip` and `optimizer step`; a subclass measures in it."""
        return nullcontext()

    def _accumulate_gradients(self, task: MicrobatchTask) -> tuple[Metrics, TokenScores]:
        """Adds the gradients of a microbatch to the accumulated ones.

        The loss, which keeps the memory of the graph, ends with this method.
        """
        with torch.set_grad_enabled(task.has_gradient), self.phase("forward"):
            loss, metrics, scores = self._loss(task)
        if task.has_gradient:
            with self.phase("backward"):
                self._backward(loss)
        return metrics, scores

    def _loss(self, task: MicrobatchTask) -> tuple[Tensor, Metrics, TokenScores]:
        """Computes the loss of a microbatch, its metrics, and the scores of its tokens."""
        inputs, age = copy_to_device((self.loss.prepare(task.batch, task.totals), task.batch.age), self.scorer.device)
        out = self.loss(inputs, entropy_coef=task.entropy_coef)
        sample, indices = inputs.sample_log_prob, inputs.mask_indices
        old_log_prob = out["log_prob"] if inputs.old_log_prob is None else inputs.old_log_prob
        metrics = dict(out["metrics"].items())
        if age is not None:
            max_age = self.config.train.max_policy_age
            metrics |= effective_sample_size_by_age(old_log_prob, sample, age, inputs.mask, max_age)
        has_teacher = self.config.policy.distill_coef != 0
        scores = TokenScores(
            (old_log_prob - sample).flatten()[indices],
            out["entropy"].flatten()[indices],
            out["advantage"].flatten()[indices] if has_teacher else None,
        )
        return self.loss.total(out), metrics, scores

    def _backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _sum_over_workers(self, value: Tensor) -> Tensor:
        """Sums a value over all workers of a sharded model.

        A process group alone does not imply several workers: an engine in this process creates one of its own.
        """
        if not isinstance(self._unsharded_context, ShardedModel):
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def save(self, folder: Path, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
        """Begins to write this worker's tensors; see `Learner.save`.

        group: group of all workers, used for nothing else; None: this is the only worker.
        """
        tensors = learner_tensors(self.model, self.optimizer)
        snapshot = copy_to_cpu(tensors) if self.config.train.async_checkpoint else tensors
        return partial(write_tensors, folder, snapshot, group)

    def scalar_state(self) -> dict[str, Any]:
        """Returns the scalar state, the same for every worker; see `Learner.scalar_state`."""
        return {
            **describe_model(self.model, self.base),
            "step_counts": step_counts(self.model, self.optimizer),
            "schedule_step": self.scheduler.last_epoch,
            "scaler": self.scaler.state_dict(),
        }

    def load(self, folder: Path, scalar_state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
        """Restores this worker's tensors and scalar state; see `Learner.load`. group: as for `save`."""
        shapes = saved_shapes(folder)
        check_same_model(self.model, self.base, scalar_state, shapes)
        tensors = learner_tensors(self.model, self.optimizer)
        check_same_tensors(tensors, shapes)
        read_tensors(folder, tensors, group)
        load_step_counts(self.model, self.optimizer, scalar_state["step_counts"])
        set_schedule_step(self.scheduler, scalar_state["schedule_step"])
        if self.scaler.is_enabled() and scalar_state["scaler"]:
            self.scaler.load_state_dict(scalar_state["scaler"])


def merge_outputs(outputs: Sequence[WorkerOutput]) -> WorkerOutput:
    """Merges the outputs of one worker's microbatches, in their order."""
    return WorkerOutput(
        sum(output.positions for output in outputs),
        merge_metrics([output.metrics for output in outputs]),
        [scores for output in outputs for scores in output.tokens],
    )


def _require_tensor(value: Tensor | None) -> Tensor:
    """Returns a tensor that was requested and is therefore not None."""
    assert value is not None
    return value


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, norm_value: float, limit: float) -> None:
    """Clips all gradients together to norm `limit`.

    norm: of all workers' gradients, float32 (float64 for float64 gradients), since bfloat16 would keep three digits
    only. norm_value: its value.
    """
    if not norm_value < limit - CLIP_SLACK:  # a smaller norm would multiply every gradient by one
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as `torch.nn.utils.clip_grad_norm_`
        torch._foreach_mul_([local_shard(gradient) for gradient in gradients], factor)


CLIP_SLACK = 1e-5
"""Bound on the epsilon that clipping adds to the norm in its denominator."""


def _offload_optimizer_states(worker: Worker) -> OffloadedStates:
    """Moves the states of a worker's optimizer to host memory and returns them."""
    device = next(parameter.device for parameter in worker.model.parameters())
    states = OffloadedStates(partial(optimizer_tensors, worker.model, worker.optimizer), device)
    with states.on_device():  # creates the states if the optimizer has not stepped yet
        return states
