"""Optimizer steps of a learner: microbatches, clipping, non-finite steps, checkpoints."""

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from config.schema.errors import ConfigError
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group, Verdict
from tests.groups import credit_groups, sample_tiny_groups
from tests.training.tiny_learners import REPEATS, make_learner
from torchgrpo.batches.batch import collate
from torchgrpo.training.checkpoint_tensors import write_tensors
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_state import learner_tensors
from torchgrpo.training.step_report import NonFiniteError

AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length", "pass_mean")


def gradient_of(learner: Learner, groups: list[Group]) -> torch.Tensor:
    """Returns the gradient that a step on these groups applies."""
    gradients: list[torch.Tensor] = []

    def read(*args: object) -> None:
        gradients.append(torch.cat([p.grad.flatten().double() for p in learner.worker.model.parameters()]))

    handle = learner.worker.optimizer.register_step_pre_hook(read)
    learner.step(credit_groups(learner, groups))
    handle.remove()
    return gradients[0]


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Groups of the tiny model, with random rewards."""
    groups, chance = sample_tiny_groups(num_groups=8, repeats=REPEATS), random.Random(3)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(chance.random(), {}, "scored")
    return groups


def test_without_a_reference_its_kl_is_0_and_a_teachers_is_not_called_that(groups: list[Group], tmp_path: Path) -> None:
    for policy, is_reported in ((PolicyConfig(kl_coef=0.0), True), (load_policy("opd"), False)):
        learner = make_learner(tmp_path, policy)
        metrics = learner.step(credit_groups(learner, groups)).metrics
        assert metrics.get("kl/ref") == (0.0 if is_reported else None)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_the_gradient_is_clipped_to_its_limit(limit: float, groups: list[Group], tmp_path: Path) -> None:
    """Larger gradients are scaled to the limit; smaller ones are unchanged.

    The metric is the norm before clipping.
    """
    free = OptimizerConfig(lr=1e-3, clip_grad_norm=None)
    full_gradient = gradient_of(make_learner(tmp_path, optimizer=free), groups)
    learner = make_learner(tmp_path, optimizer=replace(free, clip_grad_norm=limit * float(full_gradient.norm())))
    clipped = gradient_of(learner, groups)
    if limit > 1:
        assert torch.equal(clipped, full_gradient)
    else:
        torch.testing.assert_close(clipped, limit * full_gradient, rtol=1e-5, atol=0)
    again = make_learner(tmp_path, optimizer=learner.config.optimizer)
    norm = again.step(credit_groups(again, groups)).metrics["grad_norm"]
    assert norm == pytest.approx(float(full_gradient.norm()), rel=1e-6)


def full_policy(aggregation: str) -> PolicyConfig:
    """Returns a policy with every term of the loss and the given aggregation."""
    policy = PolicyConfig(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    return replace(policy, pass_size=REPEATS) if aggregation == "pass_mean" else policy


@pytest.mark.parametrize(
    "aggregation",
    ["pass_mean", *(pytest.param(each, marks=pytest.mark.long) for each in AGGREGATIONS if each != "pass_mean")],
)
def test_microbatches_give_the_gradient_of_one_batch(groups: list[Group], aggregation: str, tmp_path: Path) -> None:
    """Microbatches may be smaller than a group, since a long group may not fit."""
    policy = full_policy(aggregation)
    one = copy.deepcopy(groups)
    silent = one[1].completions[1]
    silent.sampled_mask[:] = [False] * len(silent.token_ids)
    full_gradient = gradient_of(make_learner(tmp_path, policy), one)
    rows = 8 * REPEATS
    for accumulation, bound in ((2, 1e-6), (4, 1e-6), (8, 1e-6), (rows // 2, 1e-5), (rows, 1e-5)):
        for packs in (True, False) if accumulation > 8 else (True,):
            split = gradient_of(make_learner(tmp_path, policy, accumulation, packs=packs), one)
            assert (split - full_gradient).norm() / full_gradient.norm() < bound


@pytest.mark.parametrize("accumulation", [1, 4])
def test_at_step_zero_the_reference_is_the_policy(groups: list[Group], accumulation: int, tmp_path: Path) -> None:
    """Both are equal where they score in the same microbatches."""
    learner = make_learner(tmp_path, PolicyConfig(kl_coef=0.1), accumulation)
    report = learner.step(credit_groups(learner, groups))
    assert report.metrics["kl/ref"] == 0.0
    assert report.metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    batch = credit_groups(learner, groups)
    ref, sample = batch.ref_log_prob[batch.mask], batch.sample_log_prob[batch.mask]
    torch.testing.assert_close(ref, sample, atol=1e-5, rtol=1e-5)


def test_a_non_finite_step_changes_nothing_is_saved_and_stops_the_run(groups: list[Group], tmp_path: Path) -> None:
    learner = make_learner(tmp_path, max_nonfinite_steps=2)
    before = [p.clone() for p in learner.worker.model.parameters()]
    broken = copy.deepcopy(groups)
    broken[0].completions[0].log_probs[0] = float("nan")
    report = learner.step(credit_groups(learner, broken))
    assert report.is_skipped
    assert all(torch.equal(a, b) for a, b in zip(before, learner.worker.model.parameters(), strict=True))
    saved = torch.load(tmp_path / "nonfinite" / "optimizer_step_1.pt", weights_only=True)
    assert saved["sample_log_prob"].isnan().any()
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps"):
        learner.step(credit_groups(learner, broken))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bit_for_bit(groups: list[Group], dtype: torch.dtype, tmp_path: Path) -> None:
    first = make_learner(tmp_path, dtype=dtype)
    first.step(credit_groups(first, groups))
    first.save(tmp_path / "state")()
    second = make_learner(tmp_path, dtype=dtype)
    second.load(tmp_path / "state", first.scalar_state())
    reports = [learner.step(credit_groups(learner, groups)).metrics for learner in (first, second)]
    assert reports[0] == reports[1]
    for a, b in zip(first.worker.model.parameters(), second.worker.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.lm_head.weight", r"shape of lm_head\.weight is \[7\] in the checkpoint and \[\d+, \d+\] here"),
        ("optimizer.lm_head.weight.exp_avg", r"shape of optimizer\.lm_head\.weight\.exp_avg is \[7\] in the"),
    ],
)
def test_a_state_of_another_shape_is_refused_before_anything_is_loaded(
    groups: list[Group], name: str, message: str, tmp_path: Path
) -> None:
    first = make_learner(tmp_path)
    first.step(credit_groups(first, groups))
    write_tensors(
        tmp_path / "state", learner_tensors(first.worker.model, first.worker.optimizer) | {name: torch.zeros(7)}
    )
    second = make_learner(tmp_path)
    before = [parameter.clone() for parameter in second.worker.model.parameters()]
    with pytest.raises(ConfigError, match=message):
        second.load(tmp_path / "state", first.scalar_state())
    assert all(map(torch.equal, before, second.worker.model.parameters()))
    assert second.optimizer_steps == 0


def test_mixed_precision_is_close_to_full(groups: list[Group], tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    batch = collate(groups)
    full = learner.worker.scorer(batch.tokens).log_prob
    learner.worker.scorer.autocast_dtype = torch.bfloat16
    half = learner.worker.scorer(batch.tokens).log_prob
    assert half.dtype == torch.float32
    mask = batch.tokens.response_mask
    assert (full - half)[mask].abs().mean() < 0.1


def test_scores_come_back_in_the_order_of_the_batch(groups: list[Group], tmp_path: Path) -> None:
    """The policy has moved, so the log-probs are the policy's and not the engine's."""
    policy = PolicyConfig(old_log_prob="trainer")
    one, several = (make_learner(tmp_path, policy, count, epochs=2) for count in (1, 4))
    expected, assembled = credit_groups(one, groups).old_log_prob, credit_groups(several, groups).old_log_prob
    torch.testing.assert_close(assembled, expected, rtol=1e-5, atol=1e-5)


def test_a_process_group_of_others_is_not_the_learners(groups: list[Group], tmp_path: Path) -> None:
    """An engine in this process creates a group over devices of its own."""
    learner = make_learner(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting_point", rank=0, world_size=1)
    try:
        with CommDebugMode() as communication:
            learner.step(credit_groups(learner, groups))
    finally:
        dist.destroy_process_group()
    assert communication.get_total_counts() == 0
