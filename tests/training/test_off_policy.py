"""Tests of log-prob gap percentiles and effective sample size by age."""

import pytest
import torch

from torchgrpo.training.loss_metrics import (
    effective_sample_size_by_age,
    finalize_metrics,
    gap_percentiles,
    merge_metrics,
)


def test_percentiles_are_over_all_microbatches() -> None:
    values = torch.arange(1000.0)
    shuffled = values[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    assert gap_percentiles(shuffled) == {
        "logprob_diff/p50": 499.0,
        "logprob_diff/p99": 989.0,
        "logprob_diff/max": 999.0,
    }


def test_percentiles_without_tokens_are_zero() -> None:
    assert set(gap_percentiles(torch.zeros(0)).values()) == {0.0}


def test_effective_sample_size_covers_tokens_of_one_age() -> None:
    log_ratio = torch.tensor([[0.0, 0.0, 2.0], [0.0, -1.0, 9.0]])
    age = torch.tensor([[0, 0, 1], [0, 1, 1]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    zeros = torch.zeros_like(log_ratio)
    halves = [
        effective_sample_size_by_age(log_ratio[row], zeros[row], age[row], mask[row], max_age=2)
        for row in (slice(0, 1), slice(1, 2))
    ]
    found = finalize_metrics(merge_metrics(halves))
    weights = torch.tensor([2.0, -1.0], dtype=torch.float64).exp()
    expected = float(weights.sum() ** 2 / (2 * weights.square().sum()))
    assert found == {"ess/age_0": 1.0, "ess/age_1": pytest.approx(expected), "ess/age_2": 1.0}
