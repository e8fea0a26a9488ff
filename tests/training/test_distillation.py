"""Tests of on-policy distillation: teacher advantages, loss and metrics."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from config.schema.policy import CHOICES, OBJECTIVES, PolicyConfig, load_policy
from envs.group import Group, Verdict
from tests.groups import credit_groups, sample_tiny_groups
from tests.training.tiny_learners import REPEATS, make_learner
from torchgrpo.training.learner import Learner
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.loss_metrics import finalize_metrics
from torchgrpo.training.loss_terms import total_loss

MASK = torch.tensor([[True, True, False], [True, False, False]])


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


LOG_PROB = tensor([-1.0, -0.5, -9.0], [-0.2, -9.0, -9.0])
ENGINE = tensor([-1.2, -0.4, -9.0], [-0.3, -9.0, -9.0])
TRAINER = tensor([-1.1, -0.6, -9.0], [-0.25, -9.0, -9.0])
TEACHER = tensor([-0.9, -1.4, math.nan], [-0.2, math.inf, -math.inf])
REWARD = tensor([2.0], [-1.0])
OLD: dict[str, Any] = {"distill_log_prob": "old"}


def inputs(**fields: Any) -> LossInputs:
    policy = load_policy("opd", **OLD | fields)
    return LossInputs.from_tensors(policy, LOG_PROB.clone().requires_grad_(), ENGINE, TRAINER, TEACHER, REWARD, MASK)


def loss_of(
    policy: PolicyConfig, log_prob: Tensor, teacher: Tensor | None, engine: Tensor = ENGINE
) -> tuple[Tensor, Any]:
    """Computes loss, gradient of the log-probs, and metrics."""
    leaf = log_prob.clone().requires_grad_()
    loss, metrics = total_loss(policy, leaf, engine, TRAINER, teacher, REWARD, MASK, entropy=-leaf.detach())
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad, finalize_metrics(metrics)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, tensor([0.3, -1.0, 0.0], [0.1, 0.0, 0.0])),
        ({"old_log_prob": "trainer"}, tensor([0.2, -0.8, 0.0], [0.05, 0.0, 0.0])),
        ({"distill_log_prob": "current"}, tensor([0.1, -0.9, 0.0], [0.0, 0.0, 0.0])),
        ({"distill_coef": 0.5}, tensor([0.15, -0.5, 0.0], [0.05, 0.0, 0.0])),
        ({"reward_coef": 0.1}, tensor([0.5, -0.8, 0.0], [0.0, 0.0, 0.0])),
        ({"distill_clamp": 0.25}, tensor([0.25, -0.25, 0.0], [0.1, 0.0, 0.0])),
        ({"distill_estimator": "k2"}, tensor([-0.045, -0.5, 0.0], [-0.005, 0.0, 0.0])),
        ({"distill_estimator": "abs", "distill_coef": 2.0}, tensor([-0.6, -2.0, 0.0], [-0.2, 0.0, 0.0])),
    ],
)
def test_the_advantage_by_hand(fields: dict[str, Any], expected: Tensor) -> None:
    inputs_without_old = inputs(**fields)
    torch.testing.assert_close(inputs_without_old.advantage, expected, rtol=1e-12, atol=1e-12)
    assert not inputs_without_old.advantage.requires_grad


def test_current_log_probs_stand_in_for_missing_old_ones() -> None:
    policy = load_policy("opd", old_log_prob="trainer", **OLD)
    inputs_without_old = LossInputs.from_tensors(policy, LOG_PROB, ENGINE, None, TEACHER, REWARD, MASK)
    torch.testing.assert_close(inputs_without_old.advantage[MASK], (TEACHER - LOG_PROB)[MASK])


def test_the_loss_and_its_gradient_by_hand() -> None:
    """Loss and gradient are means over three tokens, one of them clipped.

    Ratios: exp(0.2) > 1.2 (clipped: A > 0), exp(-0.1) and exp(0.1). Advantages: 0.3, -1 and 0.1.
    """
    gradient, numbers = loss_of(load_policy("opd", **OLD), LOG_PROB, TEACHER)
    terms = [-1.2 * 0.3, math.exp(-0.1), -math.exp(0.1) * 0.1]
    assert numbers["loss/objective"] == pytest.approx(sum(terms) / 3, rel=1e-12)
    expected = tensor([0.0, terms[1] / 3, 0.0], [terms[2] / 3, 0.0, 0.0])
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_its_metrics() -> None:
    _, numbers = loss_of(load_policy("opd", distill_coef=2.0, kl_estimator="k1", **OLD), LOG_PROB, TEACHER)
    assert numbers["distill/mean"] == pytest.approx(2 * (0.3 - 1.0 + 0.1) / 3)
    assert numbers["distill/abs_mean"] == pytest.approx(2 * (0.3 + 1.0 + 0.1) / 3)
    assert numbers["kl/teacher"] == pytest.approx((-0.1 + 0.9 + 0.0) / 3)
    assert "kl/ref" not in numbers
    _, plain = loss_of(PolicyConfig(), LOG_PROB, TEACHER)
    assert "kl/ref" in plain and not {"kl/teacher", "distill/mean", "distill/abs_mean"} & plain.keys()


VARIANTS: list[dict[str, Any]] = [
    *({"objective": each} for each in OBJECTIVES.names if each != "geometric"),
    *({"ratio": each, "objective": "none"} for each in CHOICES["ratio"]),
    *({"select_tokens": each} for each in CHOICES["select_tokens"]),
    *({"old_log_prob": "trainer", "mismatch": each} for each in CHOICES["mismatch"]),
    *({"distill_estimator": each} for each in CHOICES["distill_estimator"]),
    {"trust_regions": [{"measure": "tv", "low": -0.2, "high": 0.2, "side": "outward"}]},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_a_teacher_equal_to_the_policy_gives_no_gradient(fields: dict[str, Any]) -> None:
    """An on-policy teacher with the policy's log-probs gives exact zeros."""
    policy = load_policy("opd", **fields)
    leaf = LOG_PROB.clone().requires_grad_()
    loss, _ = total_loss(policy, leaf, LOG_PROB, LOG_PROB, LOG_PROB, REWARD, MASK, entropy=LOG_PROB + 10)
    loss.backward()
    assert leaf.grad is not None and not leaf.grad.any()


@pytest.mark.parametrize("fields", [each for each in VARIANTS if "distill_estimator" not in each], ids=str)
def test_a_teacher_advantage_acts_as_a_reward_advantage(fields: dict[str, Any]) -> None:
    """Equal values as the reward's advantage give the same loss and gradient."""
    policy = load_policy("opd", **OLD | fields)
    advantage = LossInputs.from_tensors(policy, LOG_PROB, ENGINE, TRAINER, TEACHER, REWARD, MASK).advantage
    as_reward = replace(policy, reward_coef=1.0, distill_coef=0.0)
    results = []
    for chosen, given in ((policy, REWARD), (as_reward, advantage)):
        leaf = LOG_PROB.clone().requires_grad_()
        loss, _ = total_loss(chosen, leaf, ENGINE, TRAINER, TEACHER, given, MASK, entropy=LOG_PROB + 10)
        loss.backward()
        assert leaf.grad is not None
        results.append((loss, leaf.grad))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert results[0][1].any()


def test_the_reward_coefficient_applies_without_a_teacher() -> None:
    halved, whole = (loss_of(PolicyConfig(kl_coef=0.0, reward_coef=coef), LOG_PROB, None)[0] for coef in (0.5, 1.0))
    torch.testing.assert_close(halved, whole / 2)
    kl, _ = loss_of(PolicyConfig(reward_coef=0.0, kl_coef=1.0, kl_estimator="k2"), LOG_PROB, TEACHER)
    torch.testing.assert_close(kl[MASK], (LOG_PROB - TEACHER)[MASK] / 3)  # only the KL to the reference has a gradient


def test_a_teacher_different_by_rounding_gives_no_gradient() -> None:
    """Sums in another order give the teacher other float32 bits than the policy."""
    policy, leaf = load_policy("opd"), LOG_PROB.float().requires_grad_()
    teacher = LOG_PROB.float() * (1 + 2e-7)
    assert (teacher != LOG_PROB.float()).any()
    loss, _ = total_loss(policy, leaf, LOG_PROB, LOG_PROB, teacher, REWARD, MASK, entropy=LOG_PROB + 10)
    loss.backward()
    assert leaf.grad is not None and not leaf.grad.any()


def test_a_missing_teacher_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"policy.distill_coef=1.0 needs ref_log_prob"):
        loss_of(load_policy("opd"), LOG_PROB, None)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Groups of equal rewards, which alone have zero advantages."""
    groups = sample_tiny_groups(num_groups=8, repeats=REPEATS)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(1.0, {}, "scored")
    return groups


def make_distilling_learner(tmp_path: Path, policy: PolicyConfig, accumulation: int = 1) -> Learner:
    """Returns a learner whose teacher is another model than its policy."""
    learner = make_learner(tmp_path, policy, accumulation, dtype=torch.float64)
    assert learner.worker.reference is not None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in learner.worker.reference.scorer.model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return learner


@pytest.mark.parametrize("select_tokens", ["none", "clip_covariance", "kl_covariance"])
def test_microbatches_have_the_gradient_of_the_batch(groups: list[Group], select_tokens: str, tmp_path: Path) -> None:
    policy = load_policy("opd", select_tokens=select_tokens, covariance_range=[-5.0, 5.0])
    learners = [make_distilling_learner(tmp_path, policy, accumulation) for accumulation in (1, 4)]
    whole, split = (learner.step(credit_groups(learner, groups)) for learner in learners)
    assert whole.metrics["grad_norm"] > 0
    for name in ("grad_norm", "loss/objective", "kl/teacher", "distill/mean", "distill/abs_mean"):
        assert split.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-6), name
    torch.testing.assert_close(split.advantage, whole.advantage, rtol=1e-5, atol=1e-6)


def test_the_report_has_the_advantage_that_was_trained_with(groups: list[Group], tmp_path: Path) -> None:
    learner = make_distilling_learner(tmp_path, load_policy("opd", reward_coef=0.5, distill_coef=0.25, **OLD), 4)
    mixed = copy.deepcopy(groups)
    for group in mixed:
        group.completions[0].verdict = Verdict(0.0, {}, "scored")
    batch = credit_groups(learner, mixed)
    assert learner.worker.reference is not None
    teacher = learner.worker.reference.scorer(batch.tokens, batch.temperature).log_prob.detach()
    report = learner.step(batch)
    expected = 0.5 * batch.advantage + 0.25 * (teacher - batch.sample_log_prob)
    assert report.advantage.shape == batch.mask.shape
    torch.testing.assert_close(report.advantage[batch.mask], expected[batch.mask].float(), rtol=1e-4, atol=1e-5)
    assert not report.advantage[~batch.mask].any()


def test_without_a_teacher_it_is_the_rewards(groups: list[Group], tmp_path: Path) -> None:
    learner = make_learner(tmp_path, PolicyConfig(reward_coef=0.5, kl_coef=0.0))
    batch = credit_groups(learner, groups)
    batch.advantage = torch.linspace(-1, 1, len(batch))[:, None]
    assert torch.equal(learner.step(batch).advantage, 0.5 * batch.advantage)


def test_a_teacher_alone_needs_no_verdict(groups: list[Group], tmp_path: Path) -> None:
    broken = copy.deepcopy(groups)
    broken[0].completions[0].verdict = Verdict(math.nan, {}, "error")
    alone, together = (
        credit_groups(make_learner(tmp_path, load_policy("opd", reward_coef=coef)), broken) for coef in (0.0, 1.0)
    )
    assert alone.mask[0].any() and not together.mask[0].any()
    assert alone.advantage.isfinite().all()
