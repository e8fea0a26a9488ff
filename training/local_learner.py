"""The learner, in one process. One optimizer step is the same gradient and metrics, whatever the microbatch split.

credit: groups -> tensors, advantages, reference and old log-probs       (once for the groups of an iteration)
step:   microbatches -> loss over the global batch -> clip -> finite? -> optimizer -> scheduler
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from config.errors import DeadlineError
from config.schema import Config
from envs.group import Group
from plan.plan import Plan
from training.aggregation import BatchTotals
from training.batch import Batch, collate
from training.credit import credit
from training.forward import score_all
from training.grpo_loss import GRPOLoss
from training.learner import NonFiniteError, StepReport
from training.learner_models import Models, make_models
from training.loss_metrics import (
    Metrics,
    effective_sample_size_by_age,
    finalize_metrics,
    gap_percentiles,
    merge_metrics,
)
from training.minibatches import microbatches
from training.model import load_model
from training.optimizer import go_to_step, load_optimizer, make_optimizer, make_scheduler
from training.trained_parameters import base_digest, load_trained, trained_state
from training.weights import PolicyTensor, PolicyWeights, adapter_weights, named_weights


def make_learner(
    config: Config,
    plan: Plan,
    run_dir: Path,
    tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> "LocalLearner":
    """The learner of a run, with the models of `config` where the plan has them; its arguments as `LocalLearner`'s."""
    models = make_models(config, load_model(config.model, torch.device(plan.devices.train_device)), plan)
    return LocalLearner(config, models, pushed_tensors(config, plan), run_dir, tell)


def pushed_tensors(config: Config, plan: Plan) -> Callable[[Any], list[PolicyTensor]]:
    """What a push carries: full weights in the engines' dtype, whatever the way; adapters as they are."""
    if config.inference_model.lora == "adapter":
        return adapter_weights
    return partial(named_weights, dtype=getattr(torch, plan.weight_dtype))


class LocalLearner(PolicyWeights):
    """Owns the policy, its optimizer and everything between judged groups and an update: a `training.learner.Learner`.

    Args:
        pushed: see `PolicyWeights`.
        run_dir: where an offending batch is saved.
        tell: told which microbatch of how many a step is at.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        pushed: Callable[[Any], list[PolicyTensor]],
        run_dir: Path,
        tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        super().__init__(models.policy, pushed)
        self.config = config
        self.scorer = models.scorer
        self.loss = GRPOLoss(models.scorer, config.policy)
        self.reference = models.reference
        self.run_dir = run_dir
        self.base = base_digest(self.model)
        self.tell = tell
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config.optimizer, config.total_optimizer_steps)
        self.scaler = torch.amp.GradScaler(enabled=config.train.mixed_precision == "fp16")
        self.optimizer_steps = 0
        self.nonfinite_steps = 0
        self.nonfinite_in_a_row = 0
        once = config.train.epochs == 1 and config.policy.kl_placement == "loss"
        self._beside = self.reference if self.reference and self.reference.beside and once else None
        self.model.train()

    @torch.no_grad()
    def credit(self, groups: Sequence[Group], policy_version: int | None = None) -> Batch:
        """As `Learner.credit`. Where the reference works beside the learner, `ref_log_prob` comes in `step`."""
        batch, policy = collate(groups), self.config.policy
        if policy_version is not None:
            batch.age = policy_version - batch.policy_version
        if self.reference is not None and self._beside is None:
            batch.ref_log_prob = self.reference.log_prob(batch).to(batch.sample_log_prob.device)
        several_steps = self.config.train.epochs > 1 or len(batch) > self.config.optim_batch_size
        if policy.old_log_prob == "trainer" and several_steps:
            batch.old_log_prob = score_all(self.scorer, batch, self._microbatch_rows(batch))
        return credit(policy, groups, batch, self.config.inference_model.max_tokens)

    def step(self, batch: Batch) -> StepReport:
        """As `Learner.step`."""
        assert batch.mask is not None, "credit comes before step"
        totals = BatchTotals.of(self.config.policy, batch.mask)
        parts: list[Metrics] = []
        gaps: list[torch.Tensor] = []
        pieces = microbatches(batch, self.scorer.together, self._microbatch_rows(batch))
        pending = [] if self._beside is None else self._beside.begin([piece.batch for piece in pieces])
        for number, (piece, scored) in enumerate(itertools.zip_longest(pieces, pending), 1):
            self.tell("optimize", number, len(pieces))
            loss, metrics, gap = self._loss(piece.batch, totals.select(piece.rows), scored)
            self.scaler.scale(loss).backward()
            parts.append(metrics)
            gaps.append(gap)
        report = {"kl/ref": 0.0, "loss/kl": 0.0, "loss/entropy": 0.0} | finalize_metrics(merge_metrics(parts))
        report |= gap_percentiles(gaps)
        report["lr"] = self.optimizer.param_groups[0]["lr"]
        report["grad_norm"] = self._clip()
        skipped = self._update(report, batch)
        report["loss/nonfinite_steps"] = float(self.nonfinite_steps)
        return StepReport(report, skipped)

    def _microbatch_rows(self, batch: Batch) -> int:
        together = self.scorer.together
        pieces = len(batch) // together
        return -(-pieces // self.config.train.gradient_accumulation_steps) * together

    def _loss(
        self, batch: Batch, totals: BatchTotals, scored: Future[torch.Tensor] | None
    ) -> tuple[torch.Tensor, Metrics, torch.Tensor]:
        """The loss, its metrics, and the gap |trainer - engine| before the update of every token in it.

        scored: the reference's log-probs, where it works beside the learner.
        """
        if scored is not None:
            batch.ref_log_prob = self._await(scored).to(batch.sample_log_prob.device)
        out = self.loss(batch, totals)
        metrics, gap = self._off_policy(batch, out["log_prob"])
        return self.loss.total(out), dict(out["metrics"].items()) | metrics, gap

    def _off_policy(self, batch: Batch, log_prob: torch.Tensor) -> tuple[Metrics, torch.Tensor]:
        """Effective sample sizes by age, and the gap of every token in the loss."""
        assert batch.mask is not None
        device = log_prob.device
        sample, mask = batch.sample_log_prob.to(device), batch.mask.to(device)
        before = log_prob if batch.old_log_prob is None else batch.old_log_prob.to(device)
        metrics: Metrics = {}
        if batch.age is not None:
            oldest = self.config.train.max_policy_age
            metrics = effective_sample_size_by_age(before, sample, batch.age.to(device), mask, oldest)
        return metrics, (before - sample).abs()[mask]

    def _await(self, scored: Future[torch.Tensor]) -> torch.Tensor:
        limit = self.config.train.wait_timeout_s
        try:
            return scored.result(timeout=limit)
        except TimeoutError:
            raise DeadlineError(
                f"the learner waited {limit:.0f} s (train.wait_timeout_s) for the reference model to score a microbatch"
            ) from None

    def _clip(self) -> float:
        self.scaler.unscale_(self.optimizer)
        limit = self.config.optimizer.clip_grad_norm or float("inf")
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _update(self, metrics: dict[str, float], batch: Batch) -> bool:
        """Apply the gradient unless it is not finite. Returns whether it was skipped."""
        values = torch.tensor([metrics["loss/objective"], metrics["grad_norm"]])
        finite = bool(values.isfinite().all())
        self.optimizer_steps += 1
        if finite:
            self.scaler.step(self.optimizer)
            self.scheduler.step()
            self.nonfinite_in_a_row = 0
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            self._report_nonfinite(metrics, batch)
        return not finite

    def _report_nonfinite(self, metrics: dict[str, float], batch: Batch) -> None:
        """An overflow that only lowers the fp16 scale is no fault; every other one is saved and counted."""
        if self.scaler.is_enabled() and torch.tensor(metrics["loss/objective"]).isfinite():
            return
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        path = self.run_dir / "nonfinite" / f"optimizer_step_{self.optimizer_steps}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(batch.to_tensordict(retain_none=False).select(*_SAVED, strict=False).to_dict(), path)
        if self.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            raise NonFiniteError(
                f"optimizer step {self.optimizer_steps}: loss {metrics['loss/objective']}, grad_norm "
                f"{metrics['grad_norm']}; {self.nonfinite_in_a_row} non-finite steps in a row "
                f"(train.max_nonfinite_steps). The batches are in {path.parent}. Lower optimizer.lr, set "
                "optimizer.clip_grad_norm, or use train.mixed_precision=bf16 instead of fp16"
            )

    def save(self) -> dict[str, Any]:
        """As `Learner.save`."""
        return {
            **trained_state(self.model, self.base),
            "optimizer": self.optimizer.state_dict(),
            "schedule_step": self.scheduler.last_epoch,
            "scaler": self.scaler.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "nonfinite_steps": self.nonfinite_steps,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def load(self, state: dict[str, Any]) -> None:
        """As `Learner.load`."""
        load_trained(self.model, state, self.base)
        load_optimizer(self.optimizer, state["optimizer"])
        go_to_step(self.scheduler, state["schedule_step"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.optimizer_steps = state["optimizer_steps"]
        self.nonfinite_steps = state["nonfinite_steps"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]


_SAVED = ("tokens", "sample_log_prob", "old_log_prob", "ref_log_prob", "advantage", "mask", "group_id")
"""Fields of a batch whose step was not finite."""
