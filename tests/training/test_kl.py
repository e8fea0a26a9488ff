"""Tests of the per-token KL estimators by hand and in expectation."""

import math
from collections.abc import Callable

import pytest
import torch

from config.schema.policy import PolicyConfig
from torchgrpo.training.kl import ESTIMATORS, kl_estimate

DIFFERENCES = (-3.0, -0.2, 0.0, 0.5, 4.0)
"""log other - log policy."""


def estimates(**policy: float | str) -> list[float]:
    log_prob = torch.full((1, len(DIFFERENCES)), -5.0, dtype=torch.float64)
    other = log_prob + torch.tensor([DIFFERENCES], dtype=torch.float64)
    inside = torch.ones_like(log_prob, dtype=torch.bool)
    return kl_estimate(PolicyConfig(**policy), log_prob, other, inside)[0].tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "formula"),
    [("k1", lambda d: -d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(d) - d - 1), ("abs", abs)],
)
def test_every_estimator_by_hand_and_within_its_clamps(name: str, formula: Callable[[float], float]) -> None:
    assert estimates(kl_estimator=name) == pytest.approx([formula(d) for d in DIFFERENCES])
    clamped = [formula(min(max(d, -1.0), 1.0)) for d in DIFFERENCES]
    assert estimates(kl_estimator=name, kl_log_ratio_clamp=1.0) == pytest.approx(clamped)
    bounded = [min(max(formula(d), -0.3), 0.3) for d in DIFFERENCES]
    assert estimates(kl_estimator=name, kl_clamp=0.3) == pytest.approx(bounded)


def test_estimates_outside_the_loss_are_zero() -> None:
    log_prob = torch.tensor([[-1.0, math.nan, -1.0]])
    inside = torch.tensor([[True, False, False]])
    for name in ESTIMATORS:
        policy = PolicyConfig(kl_estimator=name)
        (first, *outside) = kl_estimate(policy, log_prob, torch.tensor([[-2.0, 0.0, math.inf]]), inside)[0]
        assert first != 0
        assert outside == [0.0, 0.0]


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(name: str) -> None:
    """Averages over the whole vocabulary, weighted by the sampling policy."""
    policy, other = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64).log()
    inside = torch.ones(1, 3, dtype=torch.bool)
    mean = (policy.exp() * kl_estimate(PolicyConfig(kl_estimator=name), policy[None], other[None], inside)).sum()
    assert mean.item() == pytest.approx((policy.exp() * (policy - other)).sum().item())
