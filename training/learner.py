"""One optimizer step, whatever the microbatch split: the same gradient, the same metrics.

prepare: rewards -> advantages, reference and old log-probs       (once per collected batch)
step:    microbatches -> loss over the global batch -> clip -> finite? -> optimizer -> scheduler
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from config.errors import DeadlineError, RunError
from config.schema import Config
from training.advantage import (
    group_advantage,
    groups_in_range,
    overlong_reward,
    reward_kl,
    rows_in_loss,
)
from training.batch import STOP, judged, success
from training.forward import ResponseScorer, score_all
from training.loss import BatchTotals, objective
from training.loss_metrics import Metrics, finalize_metrics, merge_metrics
from training.minibatches import microbatches
from training.off_policy import effective_sample_size_by_age, gap_percentiles
from training.optimizer import go_to_step, load_optimizer, make_optimizer, make_scheduler
from training.reference import AdapterOff, Reference
from training.trained import base_digest, load_trained, trained_state


class NonFiniteError(RunError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step did. `metrics` are ready to log."""

    metrics: dict[str, float]
    skipped: bool


class Learner:
    """Owns the policy, its optimizer and everything between a batch and an update.

    Args:
        model: the policy, possibly wrapped by peft.
        scorer: log-probs of the policy.
        reference: None when nothing reads its log-probs.
        run_dir: where an offending batch is saved.
        tell: told which microbatch of how many a step is at.
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: ResponseScorer,
        reference: Reference | AdapterOff | None,
        config: Config,
        run_dir: Path,
        tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self.model = model
        self.scorer = scorer
        self.reference = reference
        self.config = config
        self.run_dir = run_dir
        self.base = base_digest(model)
        self.tell = tell
        self.optimizer = make_optimizer(model, config.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config.optimizer, config.total_optimizer_steps)
        self.scaler = torch.amp.GradScaler(enabled=config.train.mixed_precision == "fp16")
        self.optimizer_steps = 0
        self.nonfinite_steps = 0
        self.nonfinite_in_a_row = 0
        once = config.train.epochs == 1 and config.policy.kl_placement == "loss"
        self._beside = reference if isinstance(reference, Reference) and reference.beside and once else None
        model.train()

    def wants(self, groups: TensorDictBase) -> torch.Tensor:
        """[P] bool: false for the groups that dynamic sampling is to replace by others.

        groups: whole, group-major, scored.
        """
        if self.config.policy.dynamic_batching:
            return self._in_range(groups)
        return torch.ones(groups.batch_size[0] // self.config.env.repeats, dtype=torch.bool)

    def _in_range(self, groups: TensorDictBase) -> torch.Tensor:
        """[P] bool: the groups inside `policy.filter_range`."""
        reward, right, valid = groups["next", "reward"][:, 0], success(groups), judged(groups)
        grouped = (values.view(-1, self.config.env.repeats) for values in (reward, right, valid))
        return groups_in_range(self.config.policy, *grouped)

    @torch.no_grad()
    def prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds what the objective reads: advantage [N, 1], mask [N, R], ref_log_prob and old_log_prob [N, R].

        batch: whole groups, group-major, scored. A reference that works beside the learner scores in `step`.
        """
        policy, group = self.config.policy, self.config.env.repeats
        if self.reference is not None and self._beside is None:
            batch["ref_log_prob"] = self.reference.log_prob(batch).to(batch["sample_log_prob"].device)
        several_steps = self.config.train.epochs > 1 or batch.batch_size[0] > self.config.optim_batch_size
        if policy.old_log_prob == "trainer" and several_steps:
            batch["old_log_prob"] = score_all(self.scorer, batch, self._microbatch_rows(batch))
        lengths = batch["tokens", "response_mask"].sum(-1)
        max_tokens = self.config.inference_model.max_tokens
        given = batch["next", "reward"][:, 0].double()
        rewards = overlong_reward(policy, given, lengths, max_tokens)
        if policy.overlong_cache is not None:
            batch["length_reward"] = (rewards - given)[:, None]
        if self.reference is not None and self._beside is None:
            rewards = rewards - reward_kl(
                policy, batch["sample_log_prob"], batch["ref_log_prob"], batch["tokens", "loss_mask"]
            )
        valid = judged(batch)
        advantage = group_advantage(policy, rewards.view(-1, group), valid.view(-1, group))
        batch["advantage"] = advantage.view(-1, 1).float()
        stopped = batch["finish_reason"][:, 0] == STOP
        kept = rows_in_loss(policy, lengths, stopped, max_tokens) & valid
        kept &= self._in_range(batch).repeat_interleave(group)
        batch["mask"] = batch["tokens", "loss_mask"] & kept[:, None]
        return batch

    def step(self, batch: TensorDictBase) -> StepReport:
        """One update from a prepared batch of whole groups.

        Raises:
            NonFiniteError: after `train.max_nonfinite_steps` bad steps in a row.
        """
        totals = BatchTotals.of(self.config.policy, batch["mask"])
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

    def _microbatch_rows(self, batch: TensorDictBase) -> int:
        together = self.scorer.together
        pieces = batch.batch_size[0] // together
        return -(-pieces // self.config.train.gradient_accumulation_steps) * together

    def _loss(
        self, batch: TensorDictBase, totals: BatchTotals, scored: Future[torch.Tensor] | None
    ) -> tuple[torch.Tensor, Metrics, torch.Tensor]:
        """The loss, its metrics, and the gap |trainer - engine| before the update of every token in it.

        scored: the reference's log-probs, where it works beside the learner.
        """
        scores = self.scorer(batch, with_entropy=True)
        device = scores.log_prob.device
        sample, mask = batch["sample_log_prob"].to(device), batch["mask"].to(device)
        if scored is not None:
            batch["ref_log_prob"] = self._await(scored).to(batch["sample_log_prob"].device)
        old, age = _optional(batch, "old_log_prob", device), _optional(batch, "age", device)
        loss, metrics = objective(
            self.config.policy,
            scores.log_prob,
            sample,
            old,
            _optional(batch, "ref_log_prob", device),
            batch["advantage"].to(device),
            mask,
            entropy=scores.entropy,
            totals=totals,
        )
        before = scores.log_prob.detach() if old is None else old
        if age is not None:
            oldest = self.config.train.max_policy_age
            metrics |= effective_sample_size_by_age(before, sample, age, mask, oldest)
        return loss, metrics, (before - sample).abs()[mask]

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

    def _update(self, metrics: dict[str, float], batch: TensorDictBase) -> bool:
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

    def _report_nonfinite(self, metrics: dict[str, float], batch: TensorDictBase) -> None:
        """An overflow that only lowers the fp16 scale is no fault; every other one is saved and counted."""
        if self.scaler.is_enabled() and torch.tensor(metrics["loss/objective"]).isfinite():
            return
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        path = self.run_dir / "nonfinite" / f"optimizer_step_{self.optimizer_steps}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(batch.select(*_TENSORS, strict=False).to_dict(), path)
        if self.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            raise NonFiniteError(
                f"optimizer step {self.optimizer_steps}: loss {metrics['loss/objective']}, grad_norm "
                f"{metrics['grad_norm']}; {self.nonfinite_in_a_row} non-finite steps in a row "
                f"(train.max_nonfinite_steps). The batches are in {path.parent}. Lower optimizer.lr, set "
                "optimizer.clip_grad_norm, or use train.mixed_precision=bf16 instead of fp16"
            )

    def state_dict(self) -> dict[str, Any]:
        """What training has changed; what the config says is the config's."""
        return {
            **trained_state(self.model, self.base),
            "optimizer": self.optimizer.state_dict(),
            "schedule_step": self.scheduler.last_epoch,
            "scaler": self.scaler.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "nonfinite_steps": self.nonfinite_steps,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the state is of another model."""
        load_trained(self.model, state, self.base)
        load_optimizer(self.optimizer, state["optimizer"])
        go_to_step(self.scheduler, state["schedule_step"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.optimizer_steps = state["optimizer_steps"]
        self.nonfinite_steps = state["nonfinite_steps"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]


_TENSORS = ("tokens", "sample_log_prob", "old_log_prob", "ref_log_prob", "advantage", "mask", "group_id")


def _optional(batch: TensorDictBase, key: str, device: torch.device) -> torch.Tensor | None:
    return batch[key].to(device) if key in batch.keys() else None  # noqa: SIM118  (`in` compares values)
