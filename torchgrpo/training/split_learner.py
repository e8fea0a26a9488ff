"""All of a learner but its arithmetic: what groups are worth, which worker gets which, and what came of it.

    credit: groups ─▶ tensors, advantages, reference and old log-probs        (once for the groups of an iteration)
    step:   batch ─▶ totals of the whole ─▶ shares of equal work ─▶ workers ─▶ metrics of the whole

A frozen model with devices of its own (`training/scorers.py`) scores the next microbatch while workers learn from one:

    scorers   score 1 ─▶ score 2 ─▶ score 3 ─▶ ...
    workers              learn 1 ─▶ learn 2 ─▶ ...

A share's loss is divided by the totals of the whole batch and gradients are summed over workers, so neither the number
of workers nor that of microbatches changes an update.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from config.schema.config import Config
from config.schema.policy import PolicyConfig
from envs.group import Group
from envs.judging.judge import part_weights
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.batch import Batch, collate, environment_tokens
from torchgrpo.training.credit import credit
from torchgrpo.training.entropy_control import EntropyControl
from torchgrpo.training.learner import NonFiniteError, StepReport
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.loss_metrics import finalize_metrics, gap_percentiles, merge_metrics
from torchgrpo.training.microbatches import Microbatch, assemble, share_apart, share_out
from torchgrpo.training.packing import real_tokens
from torchgrpo.training.policy_terms import teaching_rows
from torchgrpo.training.token_weights import token_weights
from torchgrpo.training.worker import Part, Piece, Update

if TYPE_CHECKING:  # Ray costs a second, which a run without scorers need not wait for
    from torchgrpo.training.scorers import Scorers


class SplitLearner(ABC):
    """Base of learners, whose subclasses run the workers.

    Args:
        workers: how many there are. packs: as `ResponseScorer.packs` of theirs.
        reference: workers have the reference; it scores in turns with the policy.
        scorers: the frozen model with devices of its own; the learner's to close.
        run_dir: where an offending batch is saved.
        tell: told which microbatch of how many a step is at.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        workers: int,
        packs: bool,
        reference: bool,
        scorers: "Scorers | None",
        tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.workers = workers
        self.packs = packs
        self.reference = reference
        self.scorers = scorers
        self.tell = tell
        self._begun: dict[int, Future[Tensor]] = {}
        self.optimizer_steps = 0
        self.nonfinite_steps = 0
        self.nonfinite_in_a_row = 0
        self.entropy_control = EntropyControl(config.policy, config.policy.entropy_coef)

    def counters(self) -> dict[str, float]:
        """Counters for a checkpoint that no worker holds."""
        control = self.entropy_control
        entropy = {"entropy_coef": control.coef, "entropy_low": control.low}
        return {name: vars(self)[name] for name in COUNTERS} | entropy

    def count_from(self, state: Mapping[str, Any]) -> None:
        """Restore the `counters` in `state`."""
        self.optimizer_steps, self.nonfinite_steps, self.nonfinite_in_a_row = (
            state[name] for name in COUNTERS
        )
        if self.config.policy.entropy_target is not None and "entropy_coef" in state:
            self.entropy_control.coef, self.entropy_control.low = state["entropy_coef"], state["entropy_low"]

    @abstractmethod
    def _gradients(self, rounds: Iterator[list[Piece]]) -> list[Part]:
        """`Worker.gradients` of every worker. A round is one microbatch of each, at once."""

    @abstractmethod
    def _update(self) -> Update:
        """`Worker.update` of every worker at once; what it answers is the same for all."""

    @abstractmethod
    def _log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        """`Worker.log_prob` of every worker at once."""

    @abstractmethod
    def _scores(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        """`Worker.scores` of every worker at once."""

    @abstractmethod
    def _reference_log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        """`Worker.reference_log_prob` of every worker at once."""

    @torch.no_grad()
    def credit(self, groups: Sequence[Group], policy_version: int | None = None) -> Batch:
        """Make the batch of judged groups, with advantages.

        With scorers `ref_log_prob` may be left to `step`.
        """
        batch, policy = collate(groups), self.config.policy
        if policy_version is not None:
            batch.age = policy_version - batch.policy_version
        if self.reference:
            batch.ref_log_prob = self._scored(batch.for_reference(), self._reference_log_prob)
        elif self.scorers is not None:
            batch.ref_log_prob = self._score_first(self.scorers, groups, batch)
        several_steps = self.config.train.epochs > 1 or len(batch) > self.config.optim_batch_size
        if policy.old_log_prob == "trainer" and several_steps:
            batch.old_log_prob = self._scored(batch, self._log_prob)
        weights = part_weights(self.config.env)
        return credit(policy, groups, batch, self.config.inference_model.max_tokens, weights)

    def begin_scoring(self, group: Group) -> None:
        """Begin to score a group that a later `credit` will hold."""
        if self.scorers is not None:
            self._begun[group.group_id] = self.scorers.begin(collate([group]))

    def drop_scores(self, groups: Sequence[Group]) -> None:
        """Forget the scores of groups that no `credit` will hold."""
        for group in groups:
            scored = self._begun.pop(group.group_id, None)
            if scored is not None:
                scored.cancel()

    def _score_first(self, scorers: "Scorers", groups: Sequence[Group], batch: Batch) -> Tensor | None:
        """Log-probs [N, R] by the scorers, or None where `step` asks for them."""
        begun = [self._begun.pop(group.group_id) for group in groups if group.group_id in self._begun]
        if len(begun) == len(groups):
            ref_log_prob = torch.zeros_like(batch.sample_log_prob)
            for rows, one in zip(ref_log_prob.chunk(len(groups)), begun, strict=True):
                scored = scorers.wait(one)
                rows[:, : scored.shape[1]] = scored
            return ref_log_prob
        if self.config.train.epochs == 1 and not self.config.policy.scores_reference_first:
            return None

        def score(shares: list[list[Batch]]) -> list[list[Tensor]]:
            asked = [[scorers.begin(part) for part in share] for share in shares]
            return [[scorers.wait(scored) for scored in share] for share in asked]

        return self._scored(batch.for_reference(), score)

    def _scored(self, batch: Batch, score: Callable[[list[list[Batch]]], list[list[Tensor]]]) -> Tensor:
        """Score all tokens, [N, R] or [N, R, n], in microbatches of a step's size."""
        steps = -(-len(batch) // self.config.optim_batch_size)
        shares = self._shares(batch, steps)
        answers = score([[piece.batch for piece in share] for share in shares])
        return assemble(shares, answers, batch.sample_log_prob)

    def step(self, batch: Batch) -> StepReport:
        """Do one optimizer step on a batch."""
        policy = self.config.policy
        batch, shares = self._shared_out(batch)
        assert batch.mask is not None
        totals = BatchTotals.of(policy, batch.mask, environment_tokens(batch.tokens, batch.mask))
        coef = self.entropy_control.applied
        begun = self._begin_shares(batch, shares)
        parts = self._gradients(self._rounds(shares, begun, totals, coef))
        if begun:
            scored = [[each.result() for each in own] for own in begun]
            batch = batch.copy()
            batch.ref_log_prob = assemble(shares, scored, batch.sample_log_prob)
        log_ratio, entropy, advantage = _of_batch(policy, batch, shares, parts)
        update = self._update()
        self.optimizer_steps += 1
        report = {"loss/kl": 0.0, "loss/entropy": 0.0}
        if policy.distill_coef == 0:
            report["kl/ref"] = 0.0
        report |= finalize_metrics(merge_metrics([part.metrics for part in parts]))
        if policy.entropy_target is not None:
            report["loss/entropy_coef"] = coef
            self.entropy_control.update(report["entropy"])
        report |= gap_percentiles(log_ratio[batch.mask].abs())
        positions = sum(part.positions for part in parts)
        report["throughput/padding"] = positions / real_tokens(batch.tokens)
        report |= {"lr": update.lr, "grad_norm": update.grad_norm}
        if update.applied:
            self.nonfinite_in_a_row = 0
        elif not update.overflow:
            self._count_nonfinite(report, batch)
        report["loss/nonfinite_steps"] = float(self.nonfinite_steps)
        return StepReport(report, not update.applied, log_ratio, entropy, advantage)

    def _begin_shares(self, batch: Batch, shares: list[list[Microbatch]]) -> "list[list[Future[Tensor]]]":
        """Queue every microbatch for the scorers, [workers][count], unless the batch is scored already."""
        scorers = self.scorers
        if scorers is None or batch.ref_log_prob is not None:
            return []
        rounds = [[scorers.begin(one.batch) for one in together] for together in zip(*shares, strict=True)]
        return [list(own) for own in zip(*rounds, strict=True)]

    def _rounds(
        self,
        shares: list[list[Microbatch]],
        begun: "list[list[Future[Tensor]]]",
        totals: BatchTotals,
        entropy_coef: float,
    ) -> Iterator[list[Piece]]:
        """Yield the next microbatch of every worker, once it is scored."""
        count = len(shares[0])
        for number in range(count):
            together = [share[number] for share in shares]
            batches = [one.batch for one in together]
            if begun:
                batches = [
                    self._scored_by(own[number], batch) for own, batch in zip(begun, batches, strict=True)
                ]
            self.tell("optimize", number + 1, count)
            yield [
                Piece(batch, totals.select(one.rows), entropy_coef, one.teaches)
                for one, batch in zip(together, batches, strict=True)
            ]

    def _scored_by(self, begun: "Future[Tensor]", batch: Batch) -> Batch:
        assert self.scorers is not None
        scored: Batch = batch.copy()
        scored.ref_log_prob = self.scorers.wait(begun)
        return scored

    def _shared_out(self, batch: Batch) -> tuple[Batch, list[list[Microbatch]]]:
        """Split a step's batch into microbatches, with `weight` where the objective needs it."""
        assert batch.mask is not None and batch.advantage is not None, "credit comes before step"
        teaches = teaching_rows(self.config.policy, batch.advantage, batch.mask)
        shares = self._shares(batch, teaches=teaches)
        if not self.config.policy.weighs_whole_batches or sum(map(len, shares)) == 1:
            return batch, shares
        batch = self._weighed(batch)
        return batch, self._shares(batch, teaches=teaches)

    @torch.no_grad()
    def _weighed(self, batch: Batch) -> Batch:
        """The batch with `weight`, after one pass more, and without what `policy.count_dropped=false` leaves out."""
        policy, batch = self.config.policy, batch.copy()
        assert batch.mask is not None and batch.advantage is not None
        log_prob, entropy = self._scored(batch, self._scores).unbind(2)
        inputs = LossInputs.of(
            policy,
            log_prob,
            batch.sample_log_prob,
            batch.old_log_prob,
            batch.ref_log_prob,
            batch.advantage,
            batch.mask,
            entropy,
        )
        weights = token_weights(policy, inputs)
        batch.weight, batch.penalty = weights.policy, weights.penalty
        if not policy.count_dropped:
            batch.mask = weights.kept
        return batch

    def _shares(self, batch: Batch, steps: int = 1, teaches: Tensor | None = None) -> list[list[Microbatch]]:
        """The microbatches of every worker. steps: optimizer steps' worth of completions in the batch. teaches: bool
        [N], the rows whose gradient need not be zero; None: nothing is trained."""
        train = self.config.train
        count = steps * train.gradient_accumulation_steps
        if teaches is None:
            return share_out(batch, self.workers, count, train.max_tokens_per_microbatch, self.packs)
        return share_apart(batch, teaches, self.workers, count, train.max_tokens_per_microbatch, self.packs)

    def _count_nonfinite(self, report: dict[str, float], batch: Batch) -> None:
        """Save the batch of a non-finite step; raise after too many in a row."""
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        path = self.run_dir / "nonfinite" / f"optimizer_step_{self.optimizer_steps}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(batch.to_tensordict(retain_none=False).select(*_SAVED, strict=False).to_dict(), path)
        if self.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            raise NonFiniteError(
                f"optimizer step {self.optimizer_steps}: loss {report['loss/objective']}, grad_norm "
                f"{report['grad_norm']}; {self.nonfinite_in_a_row} non-finite steps in a row "
                f"(train.max_nonfinite_steps). The batches are in {path.parent}. Lower optimizer.lr, set "
                "optimizer.clip_grad_norm, or use train.mixed_precision=bf16 instead of fp16"
            )


def _of_batch(
    policy: PolicyConfig, batch: Batch, shares: list[list[Microbatch]], parts: Sequence[Part]
) -> tuple[Tensor, Tensor, Tensor]:
    """Put the tokens' log-ratios, entropies and advantages back into [N, R]."""
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


COUNTERS = ("optimizer_steps", "nonfinite_steps", "nonfinite_in_a_row")
_SAVED = (
    *("tokens", "teacher_tokens", "group_id", "mask", "advantage"),
    *("sample_log_prob", "old_log_prob", "ref_log_prob"),
)
"""Fields of a batch whose step was not finite."""
