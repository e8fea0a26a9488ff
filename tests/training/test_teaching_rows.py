"""Groups whose advantages are zero go through the model without a backward pass, and nothing else changes."""

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
from tests.groups import credited, drawn_from_tiny
from tests.training.presets import EVERY_PRESET
from tests.training.scorers import REPEATS, make_learner
from torchgrpo.training import learner as learners
from torchgrpo.training import policy_terms
from torchgrpo.training.learner import Learner
from torchgrpo.training.policy_terms import teaching_rows
from torchgrpo.training.step_report import StepReport

SETTLED = (1, 2, 5)
"""Groups of one reward."""


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    drawn, chance = drawn_from_tiny(num_groups=8, repeats=REPEATS), random.Random(3)
    for group in drawn:
        for completion in group.completions:
            score = 0.0 if group.group_id in SETTLED else chance.random()
            completion.verdict = Verdict(score, {}, "scored")
    return drawn


def stepped(
    learner: Learner, groups: list[Group], monkeypatch: pytest.MonkeyPatch, all_teach: bool = False
) -> tuple[StepReport, torch.Tensor, set[int]]:
    """The report of a step, the gradient that it applies, and the groups that backward saw."""
    gradients: list[torch.Tensor] = []
    seen: set[int] = set()
    model, loss, inner = learner.worker.model, learner.worker._loss, learner.worker._backward
    latest: list[int] = []

    def read(*args: object) -> None:
        gradients.append(torch.cat([each.grad.flatten().double() for each in model.parameters()]))

    def watched(piece):  # type: ignore[no-untyped-def]
        latest[:] = piece.batch.group_id[piece.batch.mask.any(1), 0].tolist()
        return loss(piece)

    def backward(total: torch.Tensor) -> None:
        seen.update(latest)
        inner(total)

    with monkeypatch.context() as patched:
        patched.setattr(learner.worker, "_loss", watched)
        patched.setattr(learner.worker, "_backward", backward)
        if all_teach:
            ones = torch.ones(len(groups) * REPEATS, dtype=torch.bool)
            patched.setattr(learners, "teaching_rows", lambda policy, advantage, mask: ones)
        handle = learner.worker.optimizer.register_step_pre_hook(read)
        report = learner.step(credited(learner, groups))
        handle.remove()
    return report, gradients[0], seen


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", EVERY_PRESET)
def test_the_update_and_the_metrics_are_those_of_all_groups(
    groups: list[Group],
    name: str,
    accumulation: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every preset without its other terms, and what tells equal rewards apart or leaves them out."""
    others: dict[str, Any] = {
        **dict.fromkeys(("kl_coef", "kl_inference_coef", "entropy_coef", "environment_coef"), 0.0),
        **dict.fromkeys(("entropy_target", "filter_range", "overlong_cache"), None),
        **dict.fromkeys(("dynamic_batching", "filter_truncated"), False),
        "covariance_penalty": 0.0,
        "whiten": "none",
    }
    policy = load_policy(name, **others)
    (one, gradient, some), (other, whole, everyone) = (
        stepped(
            make_learner(tmp_path, policy, accumulation, dtype=torch.float64), groups, monkeypatch, all_teach
        )
        for all_teach in (False, True)
    )
    assert everyone == set(range(8))
    assert some == (everyone if policy.distill_coef else everyone - set(SETTLED))
    assert (gradient - whole).norm() / whole.norm() < 1e-9
    torch.testing.assert_close(one.log_ratio, other.log_ratio, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.entropy, other.entropy, rtol=1e-6, atol=1e-6)
    assert one.metrics.keys() == other.metrics.keys()
    for key, value in one.metrics.items():
        assert value == pytest.approx(other.metrics[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("terms", [{"kl_coef": 0.1}, {"entropy_coef": 0.01}, {"kl_inference_coef": 0.1}])
def test_other_terms_of_the_loss_teach_from_every_group(
    groups: list[Group], terms: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicyConfig(**({"kl_coef": 0.0} | terms))  # type: ignore[arg-type]
    assert stepped(make_learner(tmp_path, policy), groups, monkeypatch)[2] == set(range(8))


def test_rows_that_teach_by_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyConfig(kl_coef=0.0)
    advantage, mask = torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([[True], [True], [False]])
    assert teaching_rows(policy, advantage, mask).tolist() == [False, True, False]
    taught = PolicyConfig(kl_coef=0.0, distill_coef=0.1)
    assert teaching_rows(taught, advantage, mask).tolist() == [True, True, False]
    other = replace(policy_terms.policy_term(policy), proportional=False)
    monkeypatch.setattr(policy_terms, "policy_term", lambda policy: other)
    assert teaching_rows(policy, advantage, mask).all()


def test_a_step_without_any_advantage_moves_the_weights_as_it_did(
    groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight decay, and the momentum of a step before."""
    settled = copy.deepcopy(groups)
    for completion in (one for group in settled for one in group.completions):
        completion.verdict = Verdict(1.0, {}, "scored")
    moved, optimizer = [], OptimizerConfig(lr=1e-3, weight_decay=0.1)
    for all_teach in (False, True):
        learner = make_learner(tmp_path, PolicyConfig(kl_coef=0.0), optimizer=optimizer)
        stepped(learner, groups, monkeypatch, all_teach=True)
        report, gradient, seen = stepped(learner, settled, monkeypatch, all_teach)
        assert seen == (set(range(8)) if all_teach else set())
        assert not gradient.any()
        assert report.metrics["grad_norm"] == 0
        moved.append([each.detach().clone() for each in learner.worker.model.parameters()])
    assert all(map(torch.equal, *moved))
