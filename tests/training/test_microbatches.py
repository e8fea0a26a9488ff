"""How rows are shared out: each once, as many microbatches for every worker, balanced; the gradient is the same."""

from functools import cache
from pathlib import Path

import pytest
import torch

from config.schema.policy import PolicyConfig
from envs.group import Verdict
from tests.groups import credited, drawn_from_tiny, make_completion, make_group
from tests.tiny import tiny_llama
from tests.training.scorers import REPEATS, collected, make_learner
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.credit import credit
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.grpo_loss import GRPOLoss
from torchgrpo.training.loss_metrics import finalize_metrics, merge_metrics
from torchgrpo.training.microbatches import idle, share_out
from torchgrpo.training.packed_sequence import packed_positions


def answered(lengths: list[int], repeats: int = REPEATS) -> Batch:
    """Completions of these lengths; each row's reward is its number."""
    rows = [make_completion(length, float(row)) for row, length in enumerate(lengths)]
    starts = range(0, len(rows), repeats)
    groups = [make_group(number, rows[start : start + repeats]) for number, start in enumerate(starts)]
    batch = collate(groups)
    batch.tokens.prompt = batch.tokens.prompt + batch.group_id  # no group has the prompt of another
    return batch


def spread(groups: int, repeats: int = REPEATS) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(groups * repeats).log_normal_(5.0, 0.8, generator=generator).clamp_(1, 1024).long()
    return answered(lengths.tolist(), repeats)


@cache
def scorer_of(packs: bool) -> ResponseScorer:
    return ResponseScorer(tiny_llama(), packs)


def computed(batch: Batch, packs: bool) -> int:
    return scorer_of(packs).positions(batch.tokens)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("max_tokens", [None, 1, 1100, 5000])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (1, 3), (2, 3), (5, 1)])
def test_every_row_is_in_one_microbatch(
    workers: int, microbatches: int, max_tokens: int | None, packs: bool
) -> None:
    batch = spread(9)
    shared = share_out(batch, workers, microbatches, max_tokens, packs)
    assert len({len(pieces) for pieces in shared}) == 1
    assert len(shared) == workers and len(shared[0]) >= microbatches
    taught = [piece for pieces in shared for piece in pieces if piece.batch.tokens.loss_mask.any()]
    assert torch.cat([piece.rows for piece in taught]).sort().values.tolist() == list(range(len(batch)))
    for piece in taught:
        assert torch.equal(piece.batch.next.reward, batch.next.reward[piece.rows])
        assert max_tokens is None or len(piece.rows) == 1 or computed(piece.batch, packs) <= max_tokens
    for pieces in shared:
        sizes = [computed(piece.batch, packs) for piece in pieces]
        assert sizes == sorted(sizes, reverse=True) or not packs


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 4), (4, 1), (3, 2), (8, 4)])
def test_microbatches_and_workers_have_about_as_much(workers: int, microbatches: int, packs: bool) -> None:
    """Within a tenth of the mean, or of the longest response."""
    batch = spread(32)
    shared = share_out(batch, workers, microbatches, None, packs)
    sizes = torch.tensor([[computed(piece.batch, packs) for piece in pieces] for pieces in shared]).double()
    longest = int(batch.tokens.response_mask.sum(1).max()) + batch.tokens.prompt.shape[1]
    assert sizes.max() <= max(1.12 * sizes.mean(), longest)
    assert sizes.sum(1).max() <= 1.12 * sizes.sum(1).mean()


def test_groups_stay_together_where_that_is_balanced() -> None:
    batch = answered([6] * 8 * REPEATS)
    for pieces in share_out(batch, 2, 2, None, packs=True):
        for piece in pieces:
            assert piece.rows.view(-1, REPEATS).diff().eq(1).all()
    (cut,) = share_out(answered([6] * 3 * REPEATS), 1, 2, None, packs=True)
    assert [len(piece.rows) for piece in cut] == [6, 6], "three groups are no two halves"


@pytest.mark.parametrize("packs", [True, False])
def test_what_is_one_microbatch_stays_as_it_is(packs: bool) -> None:
    batch = answered([6, 3, 2, 9, 1, 4], 3)
    for max_tokens in (None, 10_000):
        ((piece,),) = share_out(batch, 1, 1, max_tokens, packs)
        assert piece.batch is batch
        assert piece.rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_whole_rows_are_of_like_length() -> None:
    """Positions that go through the model, with lengths spread as those of a real run are."""
    batch = spread(64)
    (pieces,) = share_out(batch, 1, 16, None, packs=False)
    count = len(batch) // 16
    as_they_come = sum(computed(batch[start : start + count], False) for start in range(0, len(batch), count))
    assert sum(computed(piece.batch, False) for piece in pieces) < 0.6 * as_they_come


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    "policy", [PolicyConfig(kl_coef=0.1, entropy_coef=0.01), PolicyConfig(read_padding=True)]
)
def test_an_idle_microbatch_teaches_nothing(policy: PolicyConfig, packs: bool) -> None:
    groups = drawn_from_tiny(num_groups=2, repeats=REPEATS)
    batch = credit(policy, Rollout.of(groups), 8).batch
    batch.ref_log_prob = torch.full_like(batch.sample_log_prob, float("nan"))
    totals = BatchTotals.of(policy, batch.mask)
    batch.teacher_tokens = batch.tokens.clone()
    nothing, model = idle(batch), tiny_llama()
    assert (
        nothing.batch.reference_tokens.prompt_mask.all()
        and not nothing.batch.reference_tokens.loss_mask.any()
    )
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
    groups = drawn_from_tiny(num_groups=6, repeats=REPEATS)
    found = []
    for budget in (None, 1, 40, 100, 10_000):
        learner = make_learner(
            tmp_path, PolicyConfig(kl_coef=0.1), packs=packs, max_tokens_per_microbatch=budget
        )
        seen: list[torch.Tensor] = []
        learner.worker.optimizer.register_step_pre_hook(
            lambda *given, model=learner.worker.model, seen=seen: seen.append(
                torch.cat([p.grad.flatten().double() for p in model.parameters()])
            )
        )
        for row, completion in enumerate(one for group in groups for one in group.completions):
            completion.verdict = Verdict(float(row % 3), {}, "scored")
        padding = learner.step(credited(learner, groups)).metrics["throughput/padding"]
        assert padding > 1.0 if budget == 1 else padding > 0.5
        found.append(seen[0])
    for other in found[1:]:
        assert (other - found[0]).norm() / found[0].norm() < 1e-5


def test_padding_is_what_is_computed_over_what_is_real(tmp_path: Path) -> None:
    batch = collected()
    tokens = batch.tokens
    prompts = int(tokens.prompt_mask[::REPEATS].sum())
    real = prompts + int(tokens.response_mask.sum())
    groups = drawn_from_tiny(num_groups=6, repeats=REPEATS)
    for packs in (True, False):
        learner = make_learner(tmp_path, packs=packs)
        given = credited(learner, groups)
        expected = (
            packed_positions(given.tokens)
            if packs
            else given.tokens.prompt.numel() + (given.tokens.response.numel())
        )
        assert learner.step(given).metrics["throughput/padding"] == pytest.approx(expected / real)
        assert (expected < real) == packs
