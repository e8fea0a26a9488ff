"""Tests of the objective: presets against plain Python, padding, microbatches, metrics."""

import math

import pytest
import torch
from torch.nn.functional import pad

from config.schema.policy import AGGREGATIONS, PRESETS, PolicyConfig, load_policy
from tests.training.loss_batches import LENGTHS, VARIANTS, WIDTH, Tensors, evaluate_loss, make_batch
from tests.training.plain_objectives import PLAIN, Batch, gradient
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.loss_metrics import finalize_metrics, merge_metrics
from torchgrpo.training.loss_terms import total_loss


def plain_batch(tensors: Tensors) -> Batch:
    def rows(name: str) -> list[list[float]]:
        return [
            [value for value, kept in zip(values, inside, strict=True) if kept]
            for values, inside in zip(tensors[name].tolist(), tensors["mask"].tolist(), strict=True)
        ]

    advantage = tensors["advantage"][:, 0].tolist()
    batch = Batch(rows("now"), rows("engine"), rows("trainer"), rows("ref"), advantage, WIDTH)
    batch.entropy = [
        [entropy - log_prob for entropy, log_prob in zip(*both, strict=True)]
        for both in zip(rows("entropy"), batch.log_prob, strict=True)
    ]
    return batch


def test_every_preset_has_a_plain_counterpart() -> None:
    assert set(PLAIN) == {path.stem for path in PRESETS.glob("*.yaml")}


@pytest.mark.parametrize("preset", sorted(PLAIN))
def test_preset_against_plain_python(preset: str) -> None:
    policy = load_policy(preset, entropy_coef=0.0)
    for tensors in (
        make_batch(0),
        make_batch(1),
        make_batch(2),
        make_batch(3, lengths=[4]),
        make_batch(4, lengths=[1]),
    ):
        loss, slope, _ = evaluate_loss(policy, tensors)
        batch = plain_batch(tensors)
        assert loss.item() == pytest.approx(PLAIN[preset](batch), rel=1e-10)
        expected = torch.tensor([value for row in gradient(PLAIN[preset], batch) for value in row])
        torch.testing.assert_close(slope[tensors["mask"]], expected.double(), rtol=1e-5, atol=1e-8)
        assert slope[~tensors["mask"]].eq(0).all()


def split(tensors: Tensors, sizes: list[int]) -> list[tuple[slice, Tensors]]:
    """Splits a batch into microbatches, each as wide as its longest response."""
    parts, start = [], 0
    for size in sizes:
        rows = slice(start, start + size)
        width = max(1, int(tensors["mask"][rows].any(0).sum()))
        parts.append((rows, {name: value[rows, :width] for name, value in tensors.items()}))
        start += size
    assert start == len(LENGTHS)
    return parts


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_microbatches_add_up(variant: str, aggregation: str) -> None:
    policy = PolicyConfig(aggregation=aggregation, pass_size=4, **VARIANTS[variant])
    tensors = make_batch(seed=3)
    totals = BatchTotals.from_mask(policy, tensors["mask"])
    whole_loss, whole_gradient, whole_metrics = evaluate_loss(policy, tensors)
    assert math.isfinite(whole_loss)
    assert whole_gradient.abs().max() > 0
    for sizes in ([10], [5, 5], [3, 3, 3, 1], [1] * 10):
        results = [evaluate_loss(policy, part, totals.select(rows)) for rows, part in split(tensors, sizes)]
        loss = sum(result[0] for result in results)
        torch.testing.assert_close(loss, whole_loss, rtol=1e-12, atol=1e-14)
        joined = torch.cat([pad(result[1], (0, WIDTH - result[1].shape[1])) for result in results])
        torch.testing.assert_close(joined, whole_gradient, rtol=1e-12, atol=1e-15)
        metrics = finalize_metrics(merge_metrics(result[2] for result in results))
        assert metrics == pytest.approx(finalize_metrics(whole_metrics), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_padding_may_hold_anything(variant: str) -> None:
    policy = PolicyConfig(**VARIANTS[variant])
    clean = evaluate_loss(policy, make_batch(seed=1))
    for padding in (math.nan, math.inf, -1e30):
        dirty = evaluate_loss(policy, make_batch(seed=1, padding=padding))
        assert torch.equal(dirty[0], clean[0])
        assert torch.equal(dirty[1], clean[1])
        assert finalize_metrics(dirty[2]) == finalize_metrics(clean[2])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_tokens_is_zero(aggregation: str) -> None:
    policy = PolicyConfig(aggregation=aggregation, **VARIANTS["everything"])
    loss, slope, metrics = evaluate_loss(policy, make_batch(lengths=[0, 0], padding=math.nan))
    assert loss == 0
    assert slope.eq(0).all()
    assert all(math.isfinite(value) for value in finalize_metrics(metrics).values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_rows_is_zero(aggregation: str) -> None:
    loss, slope, _ = evaluate_loss(
        PolicyConfig(aggregation=aggregation, **VARIANTS["everything"]), make_batch(lengths=[])
    )
    assert loss == 0
    assert slope.shape == (0, WIDTH)


def test_terms_sum_to_the_loss() -> None:
    loss, _, metrics = evaluate_loss(PolicyConfig(**VARIANTS["everything"]), make_batch())
    numbers = finalize_metrics(metrics)
    parts = ("loss/objective", "loss/kl", "loss/kl_inference", "loss/entropy")
    assert sum(numbers[part] for part in parts) == pytest.approx(loss.item(), rel=1e-12)


def test_metrics_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    log_ratio = torch.tensor([[0.5, -0.5, 9.0], [-0.3, 9.0, 9.0]], dtype=torch.float64)
    engine = torch.full((2, 3), -1.0, dtype=torch.float64)
    advantage = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    ref = engine - 0.1
    _, metrics = total_loss(
        PolicyConfig(), engine + log_ratio, engine, None, ref, advantage, mask, entropy=torch.ones(2, 3)
    )
    numbers = finalize_metrics(metrics)
    ratios = [math.exp(0.5), math.exp(-0.5), math.exp(-0.3)]
    assert numbers["loss/clip_fraction_high"] == pytest.approx(1 / 3)
    assert numbers["loss/clip_fraction_low"] == pytest.approx(1 / 3)  # of the third token; the second token has A > 0
    assert numbers["ratio/max"] == pytest.approx(ratios[0])
    assert numbers["ratio/mean"] == pytest.approx(sum(ratios) / 3)
    assert numbers["ess"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)))
    k3 = [math.exp(-0.1 - d) - (-0.1 - d) - 1 for d in (0.5, -0.5, -0.3)]
    assert numbers["kl/ref"] == pytest.approx(sum(k3) / 3)
    assert numbers["entropy"] == 1.0


@pytest.mark.parametrize(
    ("bounds", "log_ratios"),
    [
        ({"log_ratio_max": 10.0}, [10.0, -30.0]),
        ({"log_ratio_min": -10.0}, [30.0, -10.0]),
        ({"log_ratio_min": -10.0, "log_ratio_max": 10.0}, [10.0, -10.0]),
    ],
)
def test_log_ratios_are_bounded_on_either_side_alone(bounds: dict[str, float], log_ratios: list[float]) -> None:
    engine = torch.full((1, 2), -40.0, dtype=torch.float64)
    now = engine + torch.tensor([[30.0, -30.0]])
    policy = PolicyConfig(objective="none", kl_coef=0.0, **bounds)  # type: ignore[arg-type]
    mask = torch.ones_like(engine, dtype=torch.bool)
    loss, metrics = total_loss(policy, now, engine, None, None, torch.ones(1, 1), mask)
    ratios = [math.exp(log_ratio) for log_ratio in log_ratios]
    assert loss.item() == pytest.approx(-sum(ratios) / 2)
    assert finalize_metrics(metrics)["ratio/max"] == pytest.approx(max(ratios))


@pytest.mark.parametrize(
    ("advantage", "clipped_log_ratios"),
    [(2.0, [0.4, -0.9, 0.1]), (-2.0, [0.9, -0.2, 0.1])],  # the clip is pessimistic, as in `clip`
)
def test_the_geometric_mean_of_clipped_ratios_by_hand(advantage: float, clipped_log_ratios: list[float]) -> None:
    log_ratio = torch.tensor([[0.9, -0.9, 0.1, 9.0]], dtype=torch.float64)
    engine = torch.full_like(log_ratio, -1.0)
    now = (engine + log_ratio).requires_grad_()
    policy = PolicyConfig(
        objective="geometric", kl_coef=0.0, aggregation="token_mean", clip_epsilon_low=0.2, clip_epsilon_high=0.4
    )
    mask = torch.tensor([[True, True, True, False]])
    loss, _ = total_loss(policy, now, engine, None, None, torch.tensor([[advantage]]), mask)
    expected = -math.exp(sum(clipped_log_ratios) / 3) * advantage
    assert loss.item() == pytest.approx(expected)
    (slope,) = torch.autograd.grad(loss, now)
    moved = [clipped_log_ratios[index] == log_ratio[0, index] for index in range(3)]
    assert slope[0].tolist() == pytest.approx([*(expected / 3 * float(free) for free in moved), 0.0])


@pytest.mark.parametrize(("advantage", "temperature"), [(2.0, 1.0), (-2.0, 1.5)])
def test_the_soft_clip_by_hand(advantage: float, temperature: float) -> None:
    """The soft clip is 4 / T sigmoid(T (ratio - 1)).

    Its slope is that of the ratio at a ratio of 1, and smaller on either side.
    """
    ratios = torch.tensor([[1.0, 1.8, 0.3]], dtype=torch.float64)
    engine = torch.full_like(ratios, -3.0)
    now = (engine + ratios.log()).requires_grad_()
    policy = PolicyConfig(
        objective="soft_clip",
        kl_coef=0.0,
        aggregation="token_sum",
        soft_clip_temperature_positive=1.0,
        soft_clip_temperature_negative=1.5,
    )
    mask = torch.ones_like(ratios, dtype=torch.bool)
    loss, _ = total_loss(policy, now, engine, None, None, torch.tensor([[advantage]]), mask)
    (slope,) = torch.autograd.grad(loss, now)
    gates = [1 / (1 + math.exp(-temperature * (ratio - 1))) for ratio in (1.0, 1.8, 0.3)]
    assert loss.item() == pytest.approx(-advantage * sum(4 / temperature * gate for gate in gates))
    shares = [4 * gate * (1 - gate) for gate in gates]
    assert shares[0] == 1.0
    expected = [-advantage * ratio * share for ratio, share in zip((1.0, 1.8, 0.3), shares, strict=True)]
    assert slope[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("term", ["clip", "geometric"])
def test_where_the_advantage_is_zero_no_clip_binds(term: str) -> None:
    engine = torch.full((1, 2), -1.0)
    now = engine + torch.tensor([[1.0, -1.0]])
    policy, mask = PolicyConfig(objective=term, kl_coef=0.0), torch.ones(1, 2, dtype=torch.bool)
    for advantage, high, low in ((0.0, 0.0, 0.0), (1.0, 0.5, 0.0), (-1.0, 0.0, 0.5)):
        _, metrics = total_loss(policy, now, engine, None, None, torch.tensor([[advantage]]), mask)
        numbers = finalize_metrics(metrics)
        assert (numbers["loss/clip_fraction_high"], numbers["loss/clip_fraction_low"]) == (high, low)


def test_the_length_epsilon_is_added_to_the_length() -> None:
    """An epsilon of 1 makes two tokens count as three in both means."""
    engine = torch.full((1, 2), -1.0, dtype=torch.float64)
    policy = PolicyConfig(
        objective="geometric", length_epsilon=1.0, kl_coef=0.0, aggregation="token_mean", clip_epsilon_high=9.0
    )
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = total_loss(policy, engine + 0.3, engine, None, None, torch.tensor([[1.5]]), mask)
    assert loss.item() == pytest.approx(-math.exp(0.6 / 3) * 3.0 / 3)


def test_mismatch_metrics() -> None:
    mask = torch.tensor([[True, True, True, False]])
    engine = torch.tensor([[-1.0, -1.0, -1.0, 0.0]])
    trainer = torch.tensor([[-1.0, -0.1, -3.0, 0.0]])
    policy = PolicyConfig(old_log_prob="trainer", mismatch="mask", mismatch_cap=2.0, mismatch_floor=0.5)
    _, metrics = total_loss(policy, trainer, engine, trainer, trainer, torch.ones(1, 1), mask)
    numbers = finalize_metrics(metrics)
    assert numbers["logprob_diff/mean"] == pytest.approx((0 + 0.9 + 2.0) / 3, rel=1e-6)
    assert numbers["mismatch/capped"] == pytest.approx(2 / 3)
    assert numbers["loss/objective"] == pytest.approx(-1 / 3)


def test_a_truncated_mismatch_weighs_at_most_the_cap() -> None:
    engine, trainer = torch.tensor([[-3.0, -1.0, -1.0]]), torch.tensor([[-1.0, -2.0, -1.0]])
    policy = PolicyConfig(
        old_log_prob="trainer", mismatch="truncate", mismatch_cap=2.0, kl_coef=0.0, aggregation="token_mean"
    )
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, _ = total_loss(policy, trainer, engine, trainer, None, torch.ones(1, 1), mask)
    assert loss.item() == pytest.approx(-(2.0 + math.exp(-1.0) + 1.0) / 3)


def test_old_log_prob_defaults_to_the_current_one() -> None:
    policy = PolicyConfig(old_log_prob="trainer", kl_coef=0.0)
    now = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    engine = torch.tensor([[-3.0, -3.0]])
    loss, _ = total_loss(policy, now, engine, None, None, torch.tensor([[2.0]]), torch.ones(1, 2))
    loss.backward()
    assert loss.item() == -2.0
    assert now.grad is not None
    assert now.grad.tolist() == [[-1.0, -1.0]]


def test_half_precision_is_computed_in_float32() -> None:
    policy = PolicyConfig(kl_coef=0.0)
    now = torch.full((1, 2), -1.0, dtype=torch.bfloat16)
    loss, _ = total_loss(policy, now, now.float() - 1e-3, None, None, torch.ones(1, 1), torch.ones(1, 2))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(1e-3), rel=1e-6)


def test_advantage_by_token() -> None:
    tensors = make_batch(seed=5)
    by_row = evaluate_loss(PolicyConfig(), tensors)
    tensors["advantage"] = tensors["advantage"].repeat(1, WIDTH)
    by_token = evaluate_loss(PolicyConfig(), tensors)
    assert torch.equal(by_row[0], by_token[0])


def test_missing_tensors_are_named() -> None:
    now = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"kl_coef=0.001 needs ref_log_prob"):
        total_loss(PolicyConfig(), now, now, None, None, now, now.bool())
    with pytest.raises(ValueError, match=r"entropy_coef=0.1 needs the entropy"):
        total_loss(PolicyConfig(kl_coef=0.0, entropy_coef=0.1), now, now, None, None, now, now.bool())
    policy = PolicyConfig(aggregation="pass_mean", kl_coef=0.0)
    totals = BatchTotals.from_mask(policy, torch.ones(4, 1).bool())
    with pytest.raises(ValueError, match=r"select\(rows\)"):
        total_loss(policy, now, now, None, None, now, now.bool(), totals=totals)
