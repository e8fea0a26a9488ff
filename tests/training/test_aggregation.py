"""Tests of loss aggregations by hand, and of their sums over microbatches."""

import pytest
import torch

from config.schema.policy import AGGREGATIONS, PolicyConfig
from torchgrpo.training.aggregation import BatchTotals, aggregate

SUMS = (2.0, 7.0, 0.0)
"""Of the values of three rows with 3, 1 and 0 tokens, 4 wide."""
BY_HAND: dict[str, tuple[dict[str, float], float]] = {
    "token_mean": ({}, 9 / 4),
    "sequence_mean": ({}, (2 / 3 + 7 / 1) / 2),
    "sequence_mean, empty rows too": ({"count_empty": True}, (2 / 3 + 7 / 1) / 3),
    "sequence_mean, one token more": ({"length_epsilon": 1.0}, (2 / 4 + 7 / 2) / 2),
    "sequence_sum": ({}, 9 / 2),
    "constant_length": ({}, 9 / (2 * 4)),
    "constant_length, of ten": ({"constant_length": 10}, 9 / (2 * 10)),
    "constant_length_sum": ({}, 9 / 4),
    "pass_mean": ({"pass_size": 1}, (2 / 3 + 7 / 1 + 0) / 3),
    "pass_mean, of two rows": ({"pass_size": 2}, (9 / 4 + 0) / 2),
    "length_weighted": ({}, (3 * 2 + 1 * 7) / 12),
    "padded_mean": ({}, 9 / 12),
    "token_sum": ({}, 9.0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_every_aggregation_by_hand(case: str) -> None:
    how, (fields, expected) = case.split(",")[0], BY_HAND[case]
    policy = PolicyConfig(aggregation=how, **fields)  # type: ignore[arg-type]
    mask = torch.arange(4)[None] < torch.tensor([3, 1, 0])[:, None]
    values = torch.zeros(3, 4, dtype=torch.float64)
    values[:, 0] = torch.tensor(SUMS)
    totals = BatchTotals.from_mask(policy, mask)
    assert aggregate(policy, how, values, mask, totals).item() == pytest.approx(expected)
    assert {name.split(",")[0] for name in BY_HAND} == set(AGGREGATIONS)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_of_one_token_is_its_value(aggregation: str) -> None:
    policy, mask = PolicyConfig(aggregation=aggregation), torch.ones(1, 1, dtype=torch.bool)
    totals = BatchTotals.from_mask(policy, mask)
    assert aggregate(policy, aggregation, torch.tensor([[3.0]]), mask, totals) == 3.0


def test_the_totals_of_the_passes_meet_values_on_another_device() -> None:
    """Totals on the CPU work with values on another device.

    The learner counts on the CPU and computes on a GPU. The `meta` device stands for the GPU: it does not mix
    with CPU tensors either.
    """
    policy, mask = PolicyConfig(aggregation="pass_mean", pass_size=2), torch.ones(4, 3, dtype=torch.bool)
    totals = BatchTotals.from_mask(policy, mask)
    values = torch.zeros(4, 3, device="meta")
    assert aggregate(policy, "pass_mean", values, mask.to("meta"), totals).device.type == "meta"
