"""Tests of batch-wide token weights, the adaptive entropy coefficient and ECHO."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group, Verdict
from tests.groups import credit_groups, sample_tiny_groups
from tests.tiny_models import tiny_llama
from tests.training.loss_batches import Tensors, make_batch
from tests.training.tiny_learners import REPEATS, make_learner, make_scorer
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.entropy_control import EntropyControl
from torchgrpo.training.grpo_loss import GRPOLoss
from torchgrpo.training.learner import Learner
from torchgrpo.training.loss_inputs import LossInputs, token_mean
from torchgrpo.training.loss_terms import total_loss
from torchgrpo.training.token_weights import TokenWeights, token_weights

BATCH_WIDE_WEIGHTS = {
    "top entropy": {"select_tokens": "top_entropy", "selected_share": 0.4},
    "clip covariance": {"select_tokens": "clip_covariance", "covariance_range": [0.01, 5.0], "selected_share": 0.2},
    "kl covariance": {"select_tokens": "kl_covariance", "selected_share": 0.1, "objective": "none"},
    "normalized": {"old_log_prob": "trainer", "mismatch": "truncate", "mismatch_normalize": True},
    "kept tokens": {"trust_regions": [{"low": 0.8, "high": 1.25}], "masked_in_denominator": False, "kl_coef": 0.1},
}


def inputs_of(policy: PolicyConfig, tensors: Tensors, log_prob: torch.Tensor) -> LossInputs:
    return LossInputs.from_tensors(
        policy,
        log_prob,
        tensors["engine"],
        tensors["trainer"],
        tensors["ref"],
        tensors["advantage"],
        tensors["mask"],
        tensors["entropy"],
    )


def loss_and_slope(
    policy: PolicyConfig, tensors: Tensors, totals: BatchTotals | None = None, weights: TokenWeights | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    log_prob = tensors["now"].clone().requires_grad_()
    loss, _ = total_loss(
        policy,
        log_prob,
        *(tensors[name] for name in ("engine", "trainer", "ref", "advantage", "mask")),
        entropy=tensors["entropy"],
        totals=totals,
        weights=weights,
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.detach(), log_prob.grad


@pytest.mark.parametrize("name", BATCH_WIDE_WEIGHTS)
def test_microbatches_with_batch_wide_weights_add_up(name: str) -> None:
    policy = load_policy("grpo", **({"kl_coef": 0.0} | BATCH_WIDE_WEIGHTS[name]))
    assert policy.has_batchwide_weights
    tensors = make_batch(seed=5)
    loss, slope = loss_and_slope(policy, tensors)
    weights = token_weights(policy, inputs_of(policy, tensors, tensors["now"]))
    mask = tensors["mask"] if policy.masked_in_denominator else weights.kept_mask
    totals = BatchTotals.from_mask(policy, mask)
    parts = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 10)):
        part = {key: value[rows] for key, value in tensors.items()} | {"mask": mask[rows]}
        penalty = None if weights.penalty is None else weights.penalty[rows]
        mine = TokenWeights(weights.policy[rows], penalty, mask[rows])
        parts.append(loss_and_slope(policy, part, totals.select(rows), mine))
    torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), slope, rtol=1e-12, atol=1e-15)
    alone = []
    for rows in (slice(0, 4), slice(4, 10)):
        part = {key: value[rows] for key, value in tensors.items()}
        alone.append(token_weights(policy, inputs_of(policy, part, part["now"])))
    split = torch.cat([one.policy if one.penalty is None else one.penalty for one in alone])
    together = weights.policy if weights.penalty is None else weights.penalty
    assert torch.equal(split, together) == bool(policy.trust_regions)  # each microbatch alone would select other tokens


def test_the_share_of_dropped_tokens_is_a_metric() -> None:
    policy = load_policy("grpo", kl_coef=0.0, **BATCH_WIDE_WEIGHTS["top entropy"])
    tensors = make_batch(seed=5)
    given = (tensors[name] for name in ("engine", "trainer", "ref", "advantage", "mask"))
    _, metrics = total_loss(policy, tensors["now"], *given, entropy=tensors["entropy"])
    dropped, tokens = metrics["loss/masked_fraction"].tolist()
    entropies = tensors["entropy"][tensors["mask"]]
    assert tokens == len(entropies)
    assert dropped == pytest.approx(0.6 * tokens, abs=1)


def test_a_mean_over_no_token_is_0() -> None:
    values = torch.tensor([[math.nan, 1.0], [2.0, 4.0]])
    assert token_mean(values, torch.zeros(2, 2, dtype=torch.bool)) == 0
    assert token_mean(values, torch.tensor([[False, True], [True, False]])) == 1.5


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    groups = sample_tiny_groups(num_groups=8, repeats=REPEATS)
    for group in groups:
        for place, completion in enumerate(group.completions):
            completion.verdict = Verdict((place * 7 + group.group_id) % 5 / 4, {}, "scored")
    return groups


def gradient(learner: Learner, groups: list[Group]) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def read(*args: object) -> None:
        model = learner.worker.model
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))

    handle = learner.worker.optimizer.register_step_pre_hook(read)
    learner.step(credit_groups(learner, groups))
    handle.remove()
    return found[0]


@pytest.mark.parametrize("name", BATCH_WIDE_WEIGHTS)
def test_a_step_does_not_depend_on_its_microbatches(name: str, groups: list[Group], tmp_path: Path) -> None:
    policy = load_policy("grpo", **({"kl_coef": 0.0} | BATCH_WIDE_WEIGHTS[name]))
    one, four = (gradient(make_learner(tmp_path, policy, count, dtype=torch.float64), groups) for count in (1, 4))
    assert one.any()
    assert (one - four).norm() / one.norm() < 1e-6  # batch-wide weights are float32


def test_the_entropy_coefficient_follows_its_target() -> None:
    policy = PolicyConfig(entropy_coef=0.01, entropy_target=0.5, entropy_coef_step=0.004)
    control = EntropyControl(policy, policy.entropy_coef)
    coefficients = []
    for entropy in (0.3, 0.5, 0.7, 0.9, 0.9, 0.2):  # at the target, the coefficient falls but still applies
        coefficients.append(round(control.next_coef, 6))
        control.update(entropy)
    assert coefficients == [0.0, 0.014, 0.01, 0.0, 0.0, 0.0]
    assert (round(control.coef, 6), control.next_coef) == (0.004, control.coef)
    fixed = EntropyControl(PolicyConfig(entropy_coef=0.01), 0.01)
    fixed.update(9.0)
    assert fixed.next_coef == 0.01


def test_a_resumed_run_continues_the_entropy_coefficient(groups: list[Group], tmp_path: Path) -> None:
    policy = load_policy("adaptive_entropy", entropy_target=100.0)
    first, second = (make_learner(tmp_path, policy) for _ in range(2))
    assert first.step(credit_groups(first, groups)).metrics["loss/entropy_coef"] == 0.0
    first.save(tmp_path / "saved")()
    second.load(tmp_path / "saved", first.scalar_state())
    report = second.step(credit_groups(second, groups)).metrics
    assert report["loss/entropy_coef"] == pytest.approx(0.01)
    assert report["loss/entropy"] == pytest.approx(-0.01 * report["entropy"], rel=1e-5)


def test_environment_tokens_have_a_log_prob_term(groups: list[Group]) -> None:
    """The loss has the negative mean log-prob of environment tokens.

    These are the middle third of each completion.
    """
    policy = load_policy("echo", environment_coef=0.5)
    written = []
    for group in groups:
        completions = []
        for one in group.completions:
            third = len(one.token_ids) // 3
            mine = [not third <= place < 2 * third for place in range(len(one.token_ids))]
            completions.append(replace(one, sampled_mask=mine))
        written.append(replace(group, completions=completions))
    batch = assign_credit(policy, Rollout.from_groups(written), max_tokens=9).batch
    loss = GRPOLoss(make_scorer(tiny_llama(), True), policy)
    out = loss(batch)
    environment = batch.tokens.response_mask & ~batch.tokens.loss_mask
    assert environment.any()
    scored = batch.tokens.copy()
    scored.loss_mask = environment
    foreseen = loss.scorer(scored).log_prob[environment].mean()
    assert out["loss_env_token_nll"].item() == pytest.approx(-0.5 * foreseen.item(), rel=1e-5)
    plain = GRPOLoss(loss.scorer, load_policy("echo", environment_coef=0.0))(batch)
    assert plain["loss_env_token_nll"].item() == 0
    assert out["loss_objective"].item() == pytest.approx(plain["loss_objective"].item(), abs=1e-6)
