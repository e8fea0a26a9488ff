"""Tests that groups without gradient skip the backward pass without other changes."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group, Verdict
from tests.groups import credit_groups, sample_tiny_groups
from tests.training.presets import EVERY_PRESET
from tests.training.tiny_learners import REPEATS, make_learner
from torchgrpo.training import learner as learners
from torchgrpo.training import policy_terms
from torchgrpo.training.learner import Learner
from torchgrpo.training.policy_terms import rows_with_gradient
from torchgrpo.training.step_report import StepReport

EQUAL_REWARD_GROUPS = (1, 2, 5)
"""Ids of groups with equal rewards."""


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    sampled_groups, chance = sample_tiny_groups(num_groups=8, repeats=REPEATS), random.Random(3)
    for group in sampled_groups:
        for completion in group.completions:
            score = 0.0 if group.group_id in EQUAL_REWARD_GROUPS else chance.random()
            completion.verdict = Verdict(score, {}, "scored")
    return sampled_groups


def take_step(
    learner: Learner, groups: list[Group], monkeypatch: pytest.MonkeyPatch, force_gradients: bool = False
) -> tuple[StepReport, torch.Tensor, set[int]]:
    """Returns report and gradient of a step, and the groups in its backward passes."""
    gradients: list[torch.Tensor] = []
    backward_groups: set[int] = set()
    model, loss, inner = learner.worker.model, learner.worker._loss, learner.worker._backward
    latest: list[int] = []

    def read(*args: object) -> None:
        gradients.append(torch.cat([each.grad.flatten().double() for each in model.parameters()]))

    def record_loss(task):  # type: ignore[no-untyped-def]
        latest[:] = task.batch.group_id[task.batch.mask.any(1), 0].tolist()
        return loss(task)

    def backward(total: torch.Tensor) -> None:
        backward_groups.update(latest)
        inner(total)

    with monkeypatch.context() as patched:
        patched.setattr(learner.worker, "_loss", record_loss)
        patched.setattr(learner.worker, "_backward", backward)
        if force_gradients:
            ones = torch.ones(len(groups) * REPEATS, dtype=torch.bool)
            patched.setattr(learners, "rows_with_gradient", lambda policy, advantage, mask: ones)
        handle = learner.worker.optimizer.register_step_pre_hook(read)
        report = learner.step(credit_groups(learner, groups))
        handle.remove()
    return report, gradients[0], backward_groups


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", EVERY_PRESET)
def test_the_update_and_the_metrics_are_those_of_all_groups(
    groups: list[Group], name: str, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates and metrics equal those of a backward pass over all groups.

    Runs each preset without its other loss terms, length penalty and filters.
    """
    others: dict[str, Any] = {
        **dict.fromkeys(("kl_coef", "kl_inference_coef", "entropy_coef", "environment_coef"), 0.0),
        **dict.fromkeys(("entropy_target", "filter_range", "overlong_cache"), None),
        **dict.fromkeys(("dynamic_batching", "filter_truncated"), False),
        "covariance_penalty": 0.0,
        "whiten": "none",
    }
    policy = load_policy(name, **others)
    (one, gradient, some), (other, whole, everyone) = (
        take_step(
            make_learner(tmp_path, policy, accumulation, dtype=torch.float64), groups, monkeypatch, force_gradients
        )
        for force_gradients in (False, True)
    )
    assert everyone == set(range(8))
    assert some == (everyone if policy.distill_coef else everyone - set(EQUAL_REWARD_GROUPS))
    assert (gradient - whole).norm() / whole.norm() < 1e-9
    torch.testing.assert_close(one.log_ratio, other.log_ratio, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.entropy, other.entropy, rtol=1e-6, atol=1e-6)
    assert one.metrics.keys() == other.metrics.keys()
    for key, value in one.metrics.items():
        assert value == pytest.approx(other.metrics[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("terms", [{"kl_coef": 0.1}, {"entropy_coef": 0.01}, {"kl_inference_coef": 0.1}])
def test_other_loss_terms_have_gradients_in_all_groups(
    groups: list[Group], terms: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicyConfig(**({"kl_coef": 0.0} | terms))  # type: ignore[arg-type]
    assert take_step(make_learner(tmp_path, policy), groups, monkeypatch)[2] == set(range(8))


def test_rows_with_gradient_by_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyConfig(kl_coef=0.0)
    advantage, mask = torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([[True], [True], [False]])
    assert rows_with_gradient(policy, advantage, mask).tolist() == [False, True, False]
    distilled = PolicyConfig(kl_coef=0.0, distill_coef=0.1)
    assert rows_with_gradient(distilled, advantage, mask).tolist() == [True, True, False]
    other = replace(policy_terms.policy_term(policy), proportional=False)
    monkeypatch.setattr(policy_terms, "policy_term", lambda policy: other)
    assert rows_with_gradient(policy, advantage, mask).all()


def test_a_step_without_advantages_still_updates_the_weights(
    groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight decay and the momentum of the previous step still apply."""
    settled = copy.deepcopy(groups)
    for completion in (one for group in settled for one in group.completions):
        completion.verdict = Verdict(1.0, {}, "scored")
    moved, optimizer = [], OptimizerConfig(lr=1e-3, weight_decay=0.1)
    for force_gradients in (False, True):
        learner = make_learner(tmp_path, PolicyConfig(kl_coef=0.0), optimizer=optimizer)
        take_step(learner, groups, monkeypatch, force_gradients=True)
        report, gradient, backward_groups = take_step(learner, settled, monkeypatch, force_gradients)
        assert backward_groups == (set(range(8)) if force_gradients else set())
        assert not gradient.any()
        assert report.metrics["grad_norm"] == 0
        moved.append([each.detach().clone() for each in learner.worker.model.parameters()])
    assert all(map(torch.equal, *moved))
