"""Partition of rows into microbatches: completeness, balance, equal gradients."""

from functools import cache
from pathlib import Path

import pytest
import torch

from config.schema.policy import PolicyConfig
from envs.group import Verdict
from tests.groups import credit_groups, make_completion, make_group, sample_tiny_groups
from tests.tiny_models import tiny_llama
from tests.training.tiny_learners import REPEATS, make_learner, sampled_batch
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.grpo_loss import GRPOLoss
from torchgrpo.training.loss_metrics import finalize_metrics, merge_metrics
from torchgrpo.training.microbatches import idle_microbatch, partition_rows
from torchgrpo.training.packed_sequence import packed_positions
from torchgrpo.training.response_scorer import ResponseScorer


def batch_of_lengths(lengths: list[int], repeats: int = REPEATS) -> Batch:
    """Builds completions of these lengths; the reward of a row is its number."""
    rows = [make_completion(length, float(row)) for row, length in enumerate(lengths)]
    starts = range(0, len(rows), repeats)
    groups = [make_group(number, rows[start : start + repeats]) for number, start in enumerate(starts)]
    batch = collate(groups)
    batch.tokens.prompt = batch.tokens.prompt + batch.group_id  # the prompts of all groups differ
    return batch


def batch_of_random_lengths(groups: int, repeats: int = REPEATS) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(groups * repeats).log_normal_(5.0, 0.8, generator=generator).clamp_(1, 1024).long()
    return batch_of_lengths(lengths.tolist(), repeats)


@cache
def scorer_of(packs: bool) -> ResponseScorer:
    return ResponseScorer(tiny_llama(), packs)


def positions_of(batch: Batch, packs: bool) -> int:
    return scorer_of(packs).count_positions(batch.tokens)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("max_tokens", [None, 1, 1100, 5000])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (1, 3), (2, 3), (5, 1)])
def test_every_row_is_in_one_microbatch(workers: int, microbatches: int, max_tokens: int | None, packs: bool) -> None:
    batch = batch_of_random_lengths(9)
    shares = partition_rows(batch, workers, microbatches, max_tokens, packs)
    assert len({len(share) for share in shares}) == 1
    assert len(shares) == workers and len(shares[0]) >= microbatches
    with_loss = [microbatch for share in shares for microbatch in share if microbatch.batch.tokens.loss_mask.any()]
    assert torch.cat([microbatch.rows for microbatch in with_loss]).sort().values.tolist() == list(range(len(batch)))
    for microbatch in with_loss:
        assert torch.equal(microbatch.batch.next.reward, batch.next.reward[microbatch.rows])
        assert max_tokens is None or len(microbatch.rows) == 1 or positions_of(microbatch.batch, packs) <= max_tokens
    for share in shares:
        sizes = [positions_of(microbatch.batch, packs) for microbatch in share]
        assert sizes == sorted(sizes, reverse=True) or not packs


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 4), (4, 1), (3, 2), (8, 4)])
def test_microbatches_and_workers_have_about_as_much(workers: int, microbatches: int, packs: bool) -> None:
    """Sizes differ from the mean by a tenth, or by the longest response."""
    batch = batch_of_random_lengths(32)
    shares = partition_rows(batch, workers, microbatches, None, packs)
    sizes = torch.tensor([[positions_of(one.batch, packs) for one in share] for share in shares]).double()
    longest = int(batch.tokens.response_mask.sum(1).max()) + batch.tokens.prompt.shape[1]
    assert sizes.max() <= max(1.12 * sizes.mean(), longest)
    assert sizes.sum(1).max() <= 1.12 * sizes.sum(1).mean()


def test_groups_stay_together_where_that_is_balanced() -> None:
    batch = batch_of_lengths([6] * 8 * REPEATS)
    for share in partition_rows(batch, 2, 2, None, packs=True):
        for microbatch in share:
            assert microbatch.rows.view(-1, REPEATS).diff().eq(1).all()
    (cut,) = partition_rows(batch_of_lengths([6] * 3 * REPEATS), 1, 2, None, packs=True)
    assert [len(microbatch.rows) for microbatch in cut] == [6, 6], "three groups are no two halves"


@pytest.mark.parametrize("packs", [True, False])
def test_a_single_microbatch_is_the_batch_itself(packs: bool) -> None:
    batch = batch_of_lengths([6, 3, 2, 9, 1, 4], 3)
    for max_tokens in (None, 10_000):
        ((microbatch,),) = partition_rows(batch, 1, 1, max_tokens, packs)
        assert microbatch.batch is batch
        assert microbatch.rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_padded_microbatches_hold_rows_of_similar_length() -> None:
    """Padded microbatches need fewer positions than rows in their order."""
    batch = batch_of_random_lengths(64)
    (share,) = partition_rows(batch, 1, 16, None, packs=False)
    count = len(batch) // 16
    as_they_come = sum(positions_of(batch[start : start + count], False) for start in range(0, len(batch), count))
    assert sum(positions_of(microbatch.batch, False) for microbatch in share) < 0.6 * as_they_come


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("policy", [PolicyConfig(kl_coef=0.1, entropy_coef=0.01), PolicyConfig(include_padding=True)])
def test_an_idle_microbatch_has_no_gradient(policy: PolicyConfig, packs: bool) -> None:
    groups = sample_tiny_groups(num_groups=2, repeats=REPEATS)
    batch = assign_credit(policy, Rollout.from_groups(groups), 8).batch
    batch.ref_log_prob = torch.full_like(batch.sample_log_prob, float("nan"))
    totals = BatchTotals.from_mask(policy, batch.mask)
    batch.teacher_tokens = batch.tokens.clone()
    nothing, model = idle_microbatch(batch), tiny_llama()
    assert nothing.batch.reference_tokens.prompt_mask.all() and not nothing.batch.reference_tokens.loss_mask.any()
    assert not ResponseScorer(model, packs)(nothing.batch.reference_tokens).log_prob.any()
    loss = GRPOLoss(ResponseScorer(model, packs), policy)
    out = loss(nothing.batch, totals.select(nothing.rows))
    loss.total(out).backward()
    assert loss.total(out).item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    metrics = finalize_metrics(merge_metrics([dict(out["metrics"].items())]))
    assert metrics["loss/objective"] == 0.0 and metrics["ratio/mean"] == 0.0


@pytest.mark.parametrize("packs", [True, False])
def test_the_gradient_does_not_depend_on_the_budget(packs: bool, tmp_path: Path) -> None:
    groups = sample_tiny_groups(num_groups=6, repeats=REPEATS)
    found = []
    for budget in (None, 1, 40, 100, 10_000):
        learner = make_learner(tmp_path, PolicyConfig(kl_coef=0.1), packs=packs, max_tokens_per_microbatch=budget)
        gradients: list[torch.Tensor] = []
        learner.worker.optimizer.register_step_pre_hook(
            lambda *arguments, model=learner.worker.model, gradients=gradients: gradients.append(
                torch.cat([p.grad.flatten().double() for p in model.parameters()])
            )
        )
        for row, completion in enumerate(one for group in groups for one in group.completions):
            completion.verdict = Verdict(float(row % 3), {}, "scored")
        padding = learner.step(credit_groups(learner, groups)).metrics["throughput/padding"]
        assert padding > 1.0 if budget == 1 else padding > 0.5
        found.append(gradients[0])
    for other in found[1:]:
        assert (other - found[0]).norm() / found[0].norm() < 1e-5


def test_padding_is_the_ratio_of_computed_to_real_positions(tmp_path: Path) -> None:
    batch = sampled_batch()
    tokens = batch.tokens
    prompts = int(tokens.prompt_mask[::REPEATS].sum())
    real = prompts + int(tokens.response_mask.sum())
    groups = sample_tiny_groups(num_groups=6, repeats=REPEATS)
    for packs in (True, False):
        learner = make_learner(tmp_path, packs=packs)
        given = credit_groups(learner, groups)
        expected = (
            packed_positions(given.tokens) if packs else given.tokens.prompt.numel() + (given.tokens.response.numel())
        )
        assert learner.step(given).metrics["throughput/padding"] == pytest.approx(expected / real)
        assert (expected < real) == packs
