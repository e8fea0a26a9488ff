"""Credits rollouts, divides each optimizer step into microbatches for workers, and reports metrics.

    credit: rollout ─▶ advantages, reference and old log-probs                (once for the groups of an iteration)
    step:   batch ─▶ totals of the batch ─▶ shares of equal work ─▶ workers ─▶ metrics of the batch

Workers compute: one in this process (`workers.py`), or ranks (`rank_workers.py`). A frozen model with
devices of its own (`frozen_scorers.py`) scores the next microbatch while workers train on the current one:

    scorers   score 1 ─▶ score 2 ─▶ score 3 ─▶ ...
    workers              train 1 ─▶ train 2 ─▶ ...

The loss of a share is divided by the totals of the whole batch, and gradients are summed over workers. So
neither the number of workers nor the number of microbatches changes an update.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from config.schema.config import Config
from envs.group import Group
from envs.reward_workers.task_scorer import component_weights
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.plan.plan import Plan
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.entropy_control import EntropyControl
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.learner_models import load_base_model, make_models
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.loss_metrics import finalize_metrics, gap_percentiles, merge_metrics
from torchgrpo.training.microbatches import Microbatch, assemble_rows, partition_by_gradient, partition_rows
from torchgrpo.training.packed_sequence import count_real_tokens
from torchgrpo.training.policy_terms import rows_with_gradient
from torchgrpo.training.published_weights import PolicyTensor, push_tensor_source
from torchgrpo.training.step_report import NonFiniteError, StepReport, gather_token_tensors
from torchgrpo.training.step_speed import StepSpeed
from torchgrpo.training.token_weights import token_weights
from torchgrpo.training.worker import MicrobatchTask, UpdateResult, Worker
from torchgrpo.training.workers import LocalWorkers, Workers

if TYPE_CHECKING:  # importing Ray is slow, and a run without ranks and scorers does not need it
    from torchgrpo.training.frozen_scorers import FrozenScorers
    from torchgrpo.training.ranks import Ranks
    from torchgrpo.training.tensor_stream import RankTensor

COUNTERS = ("optimizer_steps", "nonfinite_steps", "nonfinite_in_a_row")
_DUMPED_FIELDS = (
    *("tokens", "teacher_tokens", "group_id", "mask", "advantage"),
    *("sample_log_prob", "old_log_prob", "ref_log_prob"),
)
"""Fields of a batch that are saved after a non-finite step."""


def make_learner(
    config: Config,
    plan: Plan,
    run_dir: Path,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> "Learner":
    """Builds the learner of a run, with its models on the devices of the plan.

    Scorers load at the same time as the policy. on_progress: see `Learner`.

    Raises:
        ConfigError: a model cannot be loaded, or there is no room for the ranks.
        RankLost: a rank does not start; everything that has started is closed.
    """
    with ExitStack() as on_error:
        ranks = None
        if plan.devices.ranks > 1:
            from torchgrpo.training.rank_workers import RankWorkers, start_ranks

            ranks = start_ranks(config, plan)
            on_error.callback(ranks.close)
        scorers = None
        if plan.reference.home == "own devices":
            from torchgrpo.training.frozen_scorers import FrozenScorers

            scorers = FrozenScorers(config, plan)
            on_error.callback(scorers.close)
        workers: Workers
        if ranks is not None:
            workers = RankWorkers(config, plan, ranks)
        else:
            models = make_models(config, load_base_model(config, plan), plan)
            check_forward(models.scorer, plan.weight_check.prompts, plan.weight_check.learner)
            workers = LocalWorkers(Worker(config, models, push_tensor_source(config, plan)))
        if scorers is not None:
            scorers.wait_until_loaded()
        on_error.pop_all()
    return Learner(config, workers, run_dir, on_progress, scorers, StepSpeed.from_plan(config, plan))


class Learner:
    """Trains the policy through its workers, which hold the model and the optimizer.

    Args:
        workers: compute the steps; closed with the learner.
        run_dir: folder in which the batches of non-finite steps are saved.
        on_progress: called with stage, number and count of the microbatches of a step.
        scorers: the frozen model on devices of its own; closed with the learner.
        step_speed: computes the metrics of speed, if they are to be reported.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        run_dir: Path,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        scorers: "FrozenScorers | None" = None,
        step_speed: StepSpeed | None = None,
    ) -> None:
        self.config = config
        self.workers = workers
        self.run_dir = run_dir
        self.on_progress = on_progress
        self.scorers = scorers
        self.step_speed = step_speed
        self._pending_scores: dict[int, Future[Tensor]] = {}
        self.optimizer_steps = 0
        """Optimizer steps so far, skipped ones included."""
        self.nonfinite_steps = 0
        self.nonfinite_in_a_row = 0
        self.entropy_control = EntropyControl(config.policy, config.policy.entropy_coef)

    @property
    def worker(self) -> Worker:
        """The worker of a learner in this process."""
        assert isinstance(self.workers, LocalWorkers)
        return self.workers.worker

    @property
    def ranks(self) -> "Ranks | None":
        """The processes over which the learner is sharded; None for a learner in this process."""
        return self.workers.ranks

    @property
    def vocab_size(self) -> int:
        return self.workers.vocab_size

    def publish(self) -> "Sequence[PolicyTensor] | Sequence[RankTensor]":
        """Returns every tensor that a push carries, in the dtype of the push."""
        return self.workers.publish()

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Returns the log-probs of all tokens but the first, [count][length - 1]."""
        scores: list[list[float]] = self.workers.call_all("score", sequences, temperature)
        return scores

    def save(self, folder: Path) -> Callable[[], None]:
        """Begins to write every tensor that training has changed into `folder`.

        With `train.async_checkpoint` steps may follow at once, since a copy is written. Call the returned
        function once, from any thread: it returns when everything is on disk, or raises the error of writing.
        """
        return self.workers.save(folder)

    def scalar_state(self) -> dict[str, Any]:
        """Returns the scalar training state for a checkpoint, which also needs the tensors of `save`."""
        control = self.entropy_control
        counters = {name: vars(self)[name] for name in COUNTERS}
        entropy = {"entropy_coef": control.coef, "entropy_low": control.is_low}
        scalar_state: dict[str, Any] = self.workers.call_all("scalar_state")
        return scalar_state | counters | entropy

    def load(self, folder: Path, scalar_state: Mapping[str, Any]) -> None:
        """Restores the tensors of `save` and the result of `scalar_state`, from any number of processes.

        Raises:
            ConfigError: they belong to another model; nothing has been loaded.
        """
        self.workers.call_all("load", folder, scalar_state)
        for name in COUNTERS:
            setattr(self, name, scalar_state[name])
        if self.config.policy.entropy_target is not None and "entropy_coef" in scalar_state:
            self.entropy_control.coef = scalar_state["entropy_coef"]
            self.entropy_control.is_low = scalar_state["entropy_low"]

    def release_memory(self) -> None:
        """Releases unused memory on the learner's GPUs, for engines that share them."""
        self.workers.call_all("release_memory")

    def close(self) -> None:
        """Ends the processes of workers and scorers."""
        with ExitStack() as ending:
            ending.callback(self.workers.close)
            if self.scorers is not None:
                ending.callback(self.scorers.close)

    @torch.no_grad()
    def credit(self, rollout: Rollout) -> Rollout:
        """Fills in the inputs of the objective: advantages, mask, reference and old log-probs.

        Returns the rollout. With scorers, `ref_log_prob` may be left to `step`.
        """
        batch, policy = rollout.batch, self.config.policy
        if self.workers.has_reference:
            batch.ref_log_prob = self._score_batch(batch.for_reference(), "reference_log_prob")
        elif self.scorers is not None:
            batch.ref_log_prob = self._reference_from_scorers(self.scorers, rollout)
        several_steps = self.config.train.epochs > 1 or batch.num_completions > self.config.optim_batch_size
        if policy.old_log_prob == "trainer" and several_steps:
            batch.old_log_prob = self._score_batch(batch, "log_prob")
        weights = component_weights(self.config.env)
        return assign_credit(policy, rollout, self.config.response_tokens, weights)

    def begin_scoring(self, group: Group) -> None:
        """Begins to score a group for a later `credit`, if there are scorers.

        Any thread may call it.
        """
        if self.scorers is not None:
            self._pending_scores[group.group_id] = self.scorers.submit(collate([group]))

    def drop_scores(self, groups: Sequence[Group]) -> None:
        """Discards the scores of groups that no `credit` will contain."""
        for group in groups:
            scored = self._pending_scores.pop(group.group_id, None)
            if scored is not None:
                scored.cancel()

    def _reference_from_scorers(self, scorers: "FrozenScorers", rollout: Rollout) -> Tensor | None:
        """Returns reference log-probs [N, R] by the scorers, or None where `step` requests them."""
        groups, batch = rollout.groups, rollout.batch
        pending = [
            self._pending_scores.pop(group.group_id) for group in groups if group.group_id in self._pending_scores
        ]
        if len(pending) == len(groups):
            ref_log_prob = torch.zeros_like(batch.sample_log_prob)
            for rows, one in zip(ref_log_prob.split(rollout.rows_per_group), pending, strict=True):
                scored = scorers.wait_for_log_probs(one)
                rows[:, : scored.shape[1]] = scored
            return ref_log_prob
        if self.config.train.epochs == 1 and not self.config.policy.scores_reference_first:
            return None
        shares = self._partition_for_scoring(batch.for_reference())
        futures = [[scorers.submit(one.batch) for one in share] for share in shares]
        return assemble_rows(
            shares, [[scorers.wait_for_log_probs(one) for one in share] for share in futures], batch.sample_log_prob
        )

    def _score_batch(self, batch: Batch, method: str) -> Tensor:
        """Scores all tokens by a method of the workers, [N, R] or [N, R, n]."""
        shares = self._partition_for_scoring(batch)
        answers = self.workers.call_each(method, [[one.batch for one in share] for share in shares])
        return assemble_rows(shares, answers, batch.sample_log_prob)

    def _partition_for_scoring(self, batch: Batch) -> list[list[Microbatch]]:
        """Partitions a batch of any number of optimizer steps into microbatches that are only scored."""
        return self._partition(batch, steps=-(-batch.num_completions // self.config.optim_batch_size))

    def step(self, batch: Batch) -> StepReport:
        """Makes an optimizer step from whole groups of a credited batch.

        Raises:
            NonFiniteError: the step is the last of `train.max_nonfinite_steps` non-finite steps in a row.
        """
        policy, start = self.config.policy, time.perf_counter()
        batch, shares = self._partition_step(batch)
        assert batch.mask is not None
        totals = BatchTotals.from_batch(policy, batch)
        coef = self.entropy_control.next_coef
        futures = self._queue_scoring(batch, shares)
        outputs = self.workers.gradients(self._task_rounds(shares, futures, totals, coef))
        if futures:
            scored = [[each.result() for each in own] for own in futures]
            batch = batch.copy()
            batch.ref_log_prob = assemble_rows(shares, scored, batch.sample_log_prob)
        log_ratio, entropy, advantage = gather_token_tensors(policy, batch, shares, outputs)
        update: UpdateResult = self.workers.call_all("update")
        self.optimizer_steps += 1
        report = {"loss/kl": 0.0, "loss/entropy": 0.0}
        if policy.distill_coef == 0:
            report["kl/ref"] = 0.0
        report |= finalize_metrics(merge_metrics([output.metrics for output in outputs]))
        if policy.entropy_target is not None:
            report["loss/entropy_coef"] = coef
            self.entropy_control.update(report["entropy"])
        report |= gap_percentiles(log_ratio[batch.mask].abs())
        positions = sum(output.positions for output in outputs)
        report["throughput/padding"] = positions / count_real_tokens(batch.tokens)
        report |= {"lr": update.lr, "grad_norm": update.grad_norm}
        if update.is_applied:
            self.nonfinite_in_a_row = 0
        elif not update.overflow:
            self._count_nonfinite(report, batch)
        report["loss/nonfinite_steps"] = float(self.nonfinite_steps)
        speed_metrics = {}
        if self.step_speed is not None:
            peak_bytes = max(output.peak_bytes for output in outputs)
            speed_metrics = self.step_speed.metrics(batch.tokens, shares, time.perf_counter() - start, peak_bytes)
        return StepReport(report, speed_metrics, not update.is_applied, log_ratio, entropy, advantage)

    def _queue_scoring(self, batch: Batch, shares: list[list[Microbatch]]) -> "list[list[Future[Tensor]]]":
        """Submits every microbatch to the scorers, [workers][count], unless the batch is scored already."""
        scorers = self.scorers
        if scorers is None or batch.ref_log_prob is not None:
            return []
        rounds = [[scorers.submit(one.batch) for one in microbatches] for microbatches in zip(*shares, strict=True)]
        return [list(own) for own in zip(*rounds, strict=True)]

    def _task_rounds(
        self,
        shares: list[list[Microbatch]],
        futures: "list[list[Future[Tensor]]]",
        totals: BatchTotals,
        entropy_coef: float,
    ) -> Iterator[list[MicrobatchTask]]:
        """Yields the next microbatch of every worker as soon as it is scored."""
        count = len(shares[0])
        for number in range(count):
            microbatches = [share[number] for share in shares]
            batches = [one.batch for one in microbatches]
            if futures:
                assert self.scorers is not None
                batches = [batch.copy() for batch in batches]
                for own, batch in zip(futures, batches, strict=True):
                    batch.ref_log_prob = self.scorers.wait_for_log_probs(own[number])
            self.on_progress("optimize", number + 1, count)
            yield [
                MicrobatchTask(batch, totals.select(one.rows), entropy_coef, one.has_gradient)
                for one, batch in zip(microbatches, batches, strict=True)
            ]

    def _partition_step(self, batch: Batch) -> tuple[Batch, list[list[Microbatch]]]:
        """Partitions a step's batch into microbatches, with token weights where the objective needs them."""
        assert batch.mask is not None and batch.advantage is not None, "credit comes before step"
        has_gradient = rows_with_gradient(self.config.policy, batch.advantage, batch.mask)
        shares = self._partition(batch, has_gradient=has_gradient)
        if not self.config.policy.has_batchwide_weights or sum(map(len, shares)) == 1:
            return batch, shares
        batch = self._with_token_weights(batch)
        return batch, self._partition(batch, has_gradient=has_gradient)

    @torch.no_grad()
    def _with_token_weights(self, batch: Batch) -> Batch:
        """Returns the batch with the token weights of the objective.

        They need one more pass of the policy. With `policy.masked_in_denominator=false`, the mask of the
        batch omits tokens that the objective drops.
        """
        policy, batch = self.config.policy, batch.copy()
        assert batch.mask is not None and batch.advantage is not None
        log_prob, entropy = self._score_batch(batch, "log_prob_and_entropy").unbind(2)
        inputs = LossInputs.from_tensors(
            policy,
            log_prob,
            batch.sample_log_prob,
            batch.old_log_prob,
            batch.ref_log_prob,
            batch.advantage,
            batch.mask,
            entropy,
            batch.episode_rows,
        )
        weights = token_weights(policy, inputs)
        batch.weight, batch.penalty = weights.policy, weights.penalty
        if not policy.masked_in_denominator:
            batch.mask = weights.kept_mask
        return batch

    def _partition(self, batch: Batch, steps: int = 1, has_gradient: Tensor | None = None) -> list[list[Microbatch]]:
        """Returns the microbatches of every worker.

        steps: number of optimizer steps whose completions are in the batch. has_gradient: bool [N], rows
        whose gradient may be nonzero; None: the batch is only scored.
        """
        train, workers = self.config.train, self.workers
        count = steps * train.gradient_accumulation_steps
        if has_gradient is None:
            return partition_rows(batch, workers.count, count, train.max_tokens_per_microbatch, workers.packs)
        return partition_by_gradient(
            batch, has_gradient, workers.count, count, train.max_tokens_per_microbatch, workers.packs
        )

    def _count_nonfinite(self, report: dict[str, float], batch: Batch) -> None:
        """Saves the batch of a non-finite step; raises NonFiniteError after too many in a row."""
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        path = self.run_dir / "nonfinite" / f"optimizer_step_{self.optimizer_steps}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(batch.to_tensordict(retain_none=False).select(*_DUMPED_FIELDS, strict=False).to_dict(), path)
        if self.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            raise NonFiniteError(
                f"optimizer step {self.optimizer_steps}: loss {report['loss/objective']}, grad_norm "
                f"{report['grad_norm']}; {self.nonfinite_in_a_row} non-finite steps in a row "
                f"(train.max_nonfinite_steps). The batches are in {path.parent}. Lower optimizer.lr, set "
                "optimizer.clip_grad_norm, or use train.mixed_precision=bf16 instead of fp16"
            )
