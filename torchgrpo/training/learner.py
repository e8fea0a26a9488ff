"""The learner: what a batch is made of before a step, which worker gets which part, and the metrics of all.

    credit: rollout ─▶ advantages, reference and old log-probs                (once for the groups of an iteration)
    step:   batch ─▶ totals of the whole ─▶ shares of equal work ─▶ workers ─▶ metrics of the whole

Workers compute: one in this process (`workers.py`), or ranks (`ranked_workers.py`). A frozen model with devices of its
own (`scorers.py`) scores the next microbatch while workers learn from one:

    scorers   score 1 ─▶ score 2 ─▶ score 3 ─▶ ...
    workers              learn 1 ─▶ learn 2 ─▶ ...

A share's loss is divided by the totals of the whole batch and gradients are summed over workers, so neither the number
of workers nor that of microbatches changes an update.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from config.schema.config import Config
from envs.group import Group
from envs.judging.judge import part_weights
from torchgrpo.batches.batch import Batch, collate, environment_tokens
from torchgrpo.batches.rollout import Rollout
from torchgrpo.plan.plan import Plan
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.credit import credit
from torchgrpo.training.entropy_control import EntropyControl
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.learner_models import load_base, make_models
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.loss_metrics import finalize_metrics, gap_percentiles, merge_metrics
from torchgrpo.training.microbatches import Microbatch, assemble, share_apart, share_out
from torchgrpo.training.packed_sequence import real_tokens
from torchgrpo.training.policy_terms import teaching_rows
from torchgrpo.training.published_weights import PolicyTensor, pushed_tensors
from torchgrpo.training.step_report import NonFiniteError, StepReport, token_tensors
from torchgrpo.training.token_weights import token_weights
from torchgrpo.training.worker import Piece, Update, Worker
from torchgrpo.training.workers import LocalWorkers, Workers

if TYPE_CHECKING:  # Ray costs a second, which a run without ranks and scorers need not wait for
    from torchgrpo.training.ranks import Ranks
    from torchgrpo.training.scorers import Scorers
    from torchgrpo.training.tensor_stream import RankTensor

COUNTERS = ("optimizer_steps", "nonfinite_steps", "nonfinite_in_a_row")
_SAVED = (
    *("tokens", "teacher_tokens", "group_id", "mask", "advantage"),
    *("sample_log_prob", "old_log_prob", "ref_log_prob"),
)
"""Fields of a batch whose step was not finite."""


def make_learner(
    config: Config,
    plan: Plan,
    run_dir: Path,
    tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> "Learner":
    """The learner of a run, its models where the plan has them; scorers load while the policy does.

    Raises:
        ConfigError: a model cannot be loaded, or there is no room for the ranks.
        RankLost: a rank does not start; everything already started is taken down.
    """
    with ExitStack() as made:
        ranks = None
        if plan.devices.ranks > 1:
            from torchgrpo.training.ranked_workers import RankedWorkers, start_ranks

            ranks = start_ranks(config, plan)
            made.callback(ranks.close)
        scorers = None
        if plan.reference.home == "own devices":
            from torchgrpo.training.scorers import Scorers

            scorers = Scorers(config, plan)
            made.callback(scorers.close)
        workers: Workers
        if ranks is not None:
            workers = RankedWorkers(config, plan, ranks)
        else:
            models = make_models(config, load_base(config, plan), plan)
            check_forward(models.scorer, plan.weight_check.prompts, plan.weight_check.learner)
            workers = LocalWorkers(Worker(config, models, pushed_tensors(config, plan)))
        if scorers is not None:
            scorers.wait_ready()
        made.pop_all()
    return Learner(config, workers, run_dir, tell, scorers)


class Learner:
    """Owns the policy and its optimizer. Its model is built inside; nobody else reaches for it.

    Args:
        workers: compute the steps. scorers: the frozen model with devices of its own. Both are closed with the learner.
        run_dir: where an offending batch is saved.
        tell: called with the microbatch of how many that a step is at.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        run_dir: Path,
        tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
        scorers: "Scorers | None" = None,
    ) -> None:
        self.config = config
        self.workers = workers
        self.run_dir = run_dir
        self.tell = tell
        self.scorers = scorers
        self._begun: dict[int, Future[Tensor]] = {}
        self.optimizer_steps = 0
        """Made so far, skipped ones included."""
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
        """The processes that the learner is shared out over; None where it is in this one."""
        return self.workers.ranks

    @property
    def vocab_size(self) -> int:
        return self.workers.vocab_size

    def publish(self) -> "Sequence[PolicyTensor] | Sequence[RankTensor]":
        """Every tensor of the policy that a push carries, in the dtype in which it leaves."""
        return self.workers.publish()

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of all tokens but the first, [count][length - 1]."""
        scores: list[list[float]] = self.workers.call_all("score", sequences, temperature)
        return scores

    def save(self, folder: Path) -> Callable[[], None]:
        """Begin to write every tensor that training has changed into `folder`, as it is now.

        With `train.async_checkpoint` steps may follow at once: what is written is a copy. The returned function ends
        when all of it is on disk and raises what went wrong; it is to be called once, from any thread.
        """
        return self.workers.save(folder)

    def numbers(self) -> dict[str, Any]:
        """Scalar training state for a checkpoint, which also needs the tensors of `save`."""
        control = self.entropy_control
        counters = {name: vars(self)[name] for name in COUNTERS}
        entropy = {"entropy_coef": control.coef, "entropy_low": control.low}
        numbers: dict[str, Any] = self.workers.call_all("numbers")
        return numbers | counters | entropy

    def load(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        """Take up what `save` wrote and `numbers` gave, by however many processes.

        Raises:
            ConfigError: they are of another model; nothing has been loaded.
        """
        self.workers.call_all("load", folder, numbers)
        for name in COUNTERS:
            setattr(self, name, numbers[name])
        if self.config.policy.entropy_target is not None and "entropy_coef" in numbers:
            self.entropy_control.coef = numbers["entropy_coef"]
            self.entropy_control.low = numbers["entropy_low"]

    def release_memory(self) -> None:
        """Give back what the learner keeps on its GPUs and does not use; engines wake there."""
        self.workers.call_all("release_memory")

    def close(self) -> None:
        """End the processes of workers and scorers."""
        with ExitStack() as ending:
            ending.callback(self.workers.close)
            if self.scorers is not None:
                ending.callback(self.scorers.close)

    @torch.no_grad()
    def credit(self, rollout: Rollout) -> Rollout:
        """Fill in what the objective reads: advantages, mask, reference and old log-probs. Returns the rollout.

        With scorers `ref_log_prob` may be left to `step`.
        """
        batch, policy = rollout.batch, self.config.policy
        if self.workers.has_reference:
            batch.ref_log_prob = self._scored(batch.for_reference(), "reference_log_prob")
        elif self.scorers is not None:
            batch.ref_log_prob = self._score_first(self.scorers, rollout)
        several_steps = self.config.train.epochs > 1 or len(batch) > self.config.optim_batch_size
        if policy.old_log_prob == "trainer" and several_steps:
            batch.old_log_prob = self._scored(batch, "log_prob")
        weights = part_weights(self.config.env)
        return credit(policy, rollout, self.config.inference_model.max_tokens, weights)

    def begin_scoring(self, group: Group) -> None:
        """Begin to score a group for a later `credit`, where there are scorers; from any thread."""
        if self.scorers is not None:
            self._begun[group.group_id] = self.scorers.begin(collate([group]))

    def drop_scores(self, groups: Sequence[Group]) -> None:
        """Forget the scores of groups that no `credit` will hold."""
        for group in groups:
            scored = self._begun.pop(group.group_id, None)
            if scored is not None:
                scored.cancel()

    def _score_first(self, scorers: "Scorers", rollout: Rollout) -> Tensor | None:
        """Log-probs [N, R] by the scorers, or None where `step` asks for them."""
        groups, batch = rollout.groups, rollout.batch
        begun = [self._begun.pop(group.group_id) for group in groups if group.group_id in self._begun]
        if len(begun) == len(groups):
            ref_log_prob = torch.zeros_like(batch.sample_log_prob)
            for rows, one in zip(ref_log_prob.chunk(len(groups)), begun, strict=True):
                scored = scorers.wait(one)
                rows[:, : scored.shape[1]] = scored
            return ref_log_prob
        if self.config.train.epochs == 1 and not self.config.policy.scores_reference_first:
            return None
        shares = self._shares_of_steps(batch.for_reference())
        asked = [[scorers.begin(piece.batch) for piece in share] for share in shares]
        return assemble(
            shares, [[scorers.wait(one) for one in share] for share in asked], batch.sample_log_prob
        )

    def _scored(self, batch: Batch, method: str) -> Tensor:
        """Score all tokens, [N, R] or [N, R, n], by a method of the workers in microbatches of a step's size."""
        shares = self._shares_of_steps(batch)
        answers = self.workers.call_each(method, [[piece.batch for piece in share] for share in shares])
        return assemble(shares, answers, batch.sample_log_prob)

    def _shares_of_steps(self, batch: Batch) -> list[list[Microbatch]]:
        return self._shares(batch, steps=-(-len(batch) // self.config.optim_batch_size))

    def step(self, batch: Batch) -> StepReport:
        """Update from whole groups of a credited batch; NonFiniteError after `train.max_nonfinite_steps` in a row."""
        policy = self.config.policy
        batch, shares = self._shared_out(batch)
        assert batch.mask is not None
        totals = BatchTotals.of(policy, batch.mask, environment_tokens(batch.tokens, batch.mask))
        coef = self.entropy_control.applied
        begun = self._begin_shares(batch, shares)
        parts = self.workers.gradients(self._rounds(shares, begun, totals, coef))
        if begun:
            scored = [[each.result() for each in own] for own in begun]
            batch = batch.copy()
            batch.ref_log_prob = assemble(shares, scored, batch.sample_log_prob)
        log_ratio, entropy, advantage = token_tensors(policy, batch, shares, parts)
        update: Update = self.workers.call_all("update")
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
                assert self.scorers is not None
                batches = [batch.copy() for batch in batches]
                for own, batch in zip(begun, batches, strict=True):
                    batch.ref_log_prob = self.scorers.wait(own[number])
            self.tell("optimize", number + 1, count)
            yield [
                Piece(batch, totals.select(one.rows), entropy_coef, one.teaches)
                for one, batch in zip(together, batches, strict=True)
            ]

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
        log_prob, entropy = self._scored(batch, "scores").unbind(2)
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
        train, workers = self.config.train, self.workers
        count = steps * train.gradient_accumulation_steps
        if teaches is None:
            return share_out(batch, workers.count, count, train.max_tokens_per_microbatch, workers.packs)
        return share_apart(
            batch, teaches, workers.count, count, train.max_tokens_per_microbatch, workers.packs
        )

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
