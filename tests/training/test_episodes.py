"""Tests that a completion in several token sequences trains like the same completion in one.

A sequence is cut before a turn; the next sequence has all tokens before this turn as its prompt.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from config.schema.errors import ConfigError
from config.schema.policy import AGGREGATIONS, PolicyConfig, load_policy
from envs.group import Group, SequenceStart
from tests.groups import credit_groups
from tests.tiny_models import tiny_llama
from tests.training.episode_groups import COMPONENTS, MAX_TOKENS, random_streams, split_groups, whole_groups
from tests.training.presets import EVERY_PRESET
from tests.training.tiny_learners import make_learner, make_scorer
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.grpo_loss import GRPOLoss
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.loss_metrics import finalize_metrics, merge_metrics
from torchgrpo.training.microbatches import partition_by_gradient
from torchgrpo.training.policy_terms import rows_with_gradient
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.token_weights import token_weights

MISMATCH = {"old_log_prob": "trainer", "kl_coef": 0.0}
TRUST_REGION = {"measure": "ratio", "low": 0.5, "high": 2.0}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{f"aggregation {name}": {"aggregation": name} for name in AGGREGATIONS},
    **{f"sequence ratio, {name}": {"ratio": "sequence", "aggregation": name} for name in ("token_mean", "token_sum")},
    "empty completions count": {"aggregation": "sequence_mean", "count_empty": True, "length_epsilon": 1.0},
    "passes": {"aggregation": "pass_mean", "pass_size": 3},
    "KL by sequences": {"kl_aggregation": "sequence_mean", "kl_coef": 0.1},
    "KL in the reward": {"kl_placement": "reward", "kl_coef": 0.1},
    "overlong penalty": {"overlong_cache": 8, "overlong_fraction": 1.0, "filter_truncated": True},
    "length at the limit": {"filter_truncated": True, "treat_max_len_as_truncated": True},
    "discount": {"discount": 0.9, "kl_coef": 0.0},
    "discount, whitened over tokens": {"discount": 0.9, "whiten": "tokens"},
    "discount, whitened over rollouts": {"discount": 0.9, "whiten": "rollouts"},
    "length-weighted baseline": {"baseline": "length_weighted", "scale": "none"},
    "success filter": {"filter_range": [0.0, 1.0]},
    "environment tokens": {"environment_coef": 0.3, "aggregation": "sequence_mean"},
    "sampled entropy": {"entropy_coef": 0.1, "entropy_form": "sampled", "aggregation": "sequence_sum"},
    **{
        f"mismatch {kind} by {level}": {
            **MISMATCH,
            "mismatch": kind,
            "mismatch_level": level,
            "mismatch_normalize": True,
        }
        for kind in ("truncate", "mask")
        for level in ("token", "sequence", "sequence_mean")
    },
    **{
        f"trust region by {level}": {
            "trust_regions": [{**TRUST_REGION, "level": level}],
            "masked_in_denominator": counts,
        }
        for level, counts in (("sum", True), ("mean", False), ("each", True), ("each", False))
    },
    "vespo with mismatch": {**MISMATCH, "objective": "vespo", "mismatch": "truncate"},
    "geometric with mismatch": {**MISMATCH, "objective": "geometric", "mismatch": "truncate"},
    "clip covariance": {"select_tokens": "clip_covariance", "covariance_range": [0.01, 5.0], "selected_share": 0.3},
    "teacher and reward": {"distill_coef": 0.5, "kl_coef": 0.0, "ratio": "sequence"},
    "credit of turns": {"credit": "turn", "baseline": "leave_one_out", "scale": "none", "whiten": "tokens"},
}


def float64_scorer(packs: bool) -> ResponseScorer:
    """Returns a scorer of the tiny model that computes in float64 everywhere."""
    model = tiny_llama().double()
    for parent in [*model.modules()]:
        for name, module in parent.named_children():
            if isinstance(module, LlamaRMSNorm):  # computes in float32
                norm = torch.nn.RMSNorm(len(module.weight), module.variance_epsilon)
                norm.weight = module.weight
                setattr(parent, name, norm)
    return make_scorer(model, packs)


@cache
def log_probs_near_the_model(seed: int) -> Tensor:
    """Returns log-probs float64 [3, M] of engine, trainer and reference.

    They are those of the sampled tokens of `random_streams`.
    """
    tokens = collate(whole_groups(random_streams(seed))).tokens
    with torch.no_grad():
        log_prob = float64_scorer(packs=True)(tokens).log_prob[tokens.loss_mask]
    noise = torch.randn(3, len(log_prob), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return log_prob + 0.2 * noise


def credited_batch(policy: PolicyConfig, groups: list[Group], seed: int) -> Batch:
    """Returns the float64 batch of groups of `random_streams`, with advantages and all log-probs."""
    rollout = Rollout.from_groups(groups)
    batch = rollout.batch
    zeros = torch.zeros(batch.sample_log_prob.shape, dtype=torch.float64)
    batch.sample_log_prob, batch.old_log_prob, batch.ref_log_prob = (
        zeros.masked_scatter(batch.tokens.loss_mask, each) for each in log_probs_near_the_model(seed)
    )
    weights = COMPONENTS if policy.reward_components == "separate" else {}
    return assign_credit(policy, rollout, MAX_TOKENS, weights).batch


@cache
def loss_module(name: str, packs: bool) -> GRPOLoss:
    return GRPOLoss(float64_scorer(packs), load_policy(name))


def with_token_weights(loss: GRPOLoss, batch: Batch) -> Batch:
    """Returns the batch with the weights that depend on all of its tokens, in float64."""
    policy, batch = loss.policy, batch.copy()
    with torch.no_grad():
        scores = loss.scorer(batch.tokens, batch.temperature, with_entropy=True)
    inputs = LossInputs.from_tensors(
        policy,
        scores.log_prob,
        *(batch.sample_log_prob, batch.old_log_prob, batch.ref_log_prob, batch.advantage, batch.mask),
        entropy=scores.entropy,
        episodes=batch.episode_rows,
    )
    weights = token_weights(policy, inputs)
    batch.weight, batch.penalty = weights.policy, weights.penalty
    if not policy.masked_in_denominator:
        batch.mask = weights.kept_mask
    return batch


def loss_and_gradient(
    loss: GRPOLoss, batch: Batch, microbatches: int = 1, workers: int = 1
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Computes loss, gradient and metrics of a batch, summed over its microbatches."""
    policy = loss.policy
    loss.zero_grad()
    if microbatches * workers == 1:
        outs = [loss(batch)]
    else:
        has_gradient = rows_with_gradient(policy, batch.advantage, batch.mask)
        batch = with_token_weights(loss, batch) if policy.has_batchwide_weights else batch
        shares = partition_by_gradient(batch, has_gradient, workers, microbatches, None, loss.scorer.packs)
        totals = BatchTotals.from_batch(policy, batch)
        outs = [loss(one.batch, totals.select(one.rows)) for share in shares for one in share]
    total = torch.stack([loss.total(out) for out in outs]).sum()
    total.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in loss.parameters()])
    return total.detach(), gradient, finalize_metrics(merge_metrics([dict(out["metrics"].items()) for out in outs]))


def check_same_training(loss: GRPOLoss, seed: int) -> None:
    """Checks loss, gradient and metrics of split groups against those of whole groups."""
    policy, streams = loss.policy, random_streams(seed)
    expected = loss_and_gradient(loss, credited_batch(policy, whole_groups(streams), seed))
    assert expected[1].isfinite().all() and expected[1].any()
    for share, drops_replies, microbatches, workers in ((0.3, False, 1, 1), (0.7, True, 4, 1), (1.0, True, 2, 3)):
        groups = split_groups(streams, seed, share, drops_replies and not policy.environment_coef)
        batch = credited_batch(policy, groups, seed)
        assert len(batch) > batch.num_completions == len(streams) * len(streams[0])
        found = loss_and_gradient(loss, batch, microbatches, workers)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
        assert (found[1] - expected[1]).norm() <= 1e-10 * expected[1].norm()
        assert found[2] == pytest.approx(expected[2], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", EVERY_PRESET)
def test_presets_train_equally_on_split_completions(name: str, packs: bool) -> None:
    check_same_training(loss_module(name, packs), seed=int(packs))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_train_equally_on_split_completions(name: str) -> None:
    policy = load_policy("grpo", **OBJECTIVES[name])
    check_same_training(GRPOLoss(float64_scorer(packs=True), policy), seed=3)


@pytest.mark.parametrize("name", ["gspo", "vespo", "gmpo", "mis_sequence", "opsm", "dr_grpo", "compat_coati_grpo"])
def test_counting_rows_would_train_otherwise(name: str) -> None:
    """Without episode numbers, the same rows have another gradient."""
    loss = loss_module(name, packs=True)
    batch = credited_batch(loss.policy, split_groups(random_streams(0), 0, share=1.0), 0)
    expected = loss_and_gradient(loss, batch)[1]
    batch.episode = None
    found = loss_and_gradient(loss, batch)[1]
    assert (found - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("fields", [{}, {"whiten": "tokens"}, {"discount": 0.9}, {"kl_placement": "reward"}])
def test_rows_of_a_completion_have_its_advantages(fields: dict[str, Any]) -> None:
    policy, seed = PolicyConfig(kl_coef=0.1, overlong_cache=8, **fields), 4
    streams = random_streams(seed)
    whole = credited_batch(policy, whole_groups(streams), seed)
    split = credited_batch(policy, split_groups(streams, seed, share=1.0, drops_replies=True), seed)
    sampled = [each.advantage.expand_as(each.mask)[each.tokens.loss_mask] for each in (whole, split)]
    torch.testing.assert_close(sampled[0], sampled[1], rtol=1e-6, atol=1e-7)
    in_loss = [each.mask[each.tokens.loss_mask] for each in (whole, split)]
    assert torch.equal(*in_loss)
    penalties = [each.length_reward.expand_as(each.mask)[each.tokens.loss_mask] for each in (whole, split)]
    assert torch.equal(*penalties) and penalties[0].any()


@pytest.mark.parametrize("name", ["gspo", "kl_cov"])
def test_a_step_does_not_depend_on_the_split(name: str, tmp_path: Path) -> None:
    policy, streams = load_policy(name), random_streams(5, groups=8)
    found = []
    for groups in (whole_groups(streams), split_groups(streams, 5, share=1.0)):
        learner = make_learner(tmp_path, policy, 4, dtype=torch.float64)
        gradients: list[Tensor] = []
        learner.worker.optimizer.register_step_pre_hook(
            lambda *arguments, model=learner.worker.model, gradients=gradients: gradients.append(
                torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            )
        )
        metrics = learner.step(credit_groups(learner, groups)).metrics
        metrics.pop("throughput/padding")
        found.append((gradients[0], metrics))
    (one, metrics), (other, other_metrics) = found
    assert (other - one).norm() < 1e-5 * one.norm()  # log-probs of a batch are float32
    assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_old_log_probs_are_scored_for_several_steps_of_completions(tmp_path: Path) -> None:
    """A batch of one optimizer step may have more rows than completions."""
    policy = PolicyConfig(old_log_prob="trainer", kl_coef=0.0)
    groups = split_groups(random_streams(6, groups=8), 6, share=1.0)
    learner = make_learner(tmp_path, policy)
    batch = credit_groups(learner, groups)
    assert len(batch) > learner.config.optim_batch_size == batch.num_completions
    assert batch.old_log_prob is None
    assert credit_groups(make_learner(tmp_path, policy, epochs=2), groups).old_log_prob is not None


def test_padding_of_split_completions_is_refused() -> None:
    policy = PolicyConfig(include_padding=True, kl_coef=0.0)
    batch = credited_batch(policy, split_groups(random_streams(0), 0, share=1.0), 0)
    with pytest.raises(ConfigError, match=r"policy.include_padding=true.*set policy.include_padding=false"):
        BatchTotals.from_batch(policy, batch)


def test_the_teachers_prompts_grow_with_those_of_the_policy() -> None:
    groups = split_groups(random_streams(7), 7, share=1.0)
    for group in groups:
        group.teacher_prompt = (1, 2, *group.prompt)
    batch = collate(groups)
    for row in range(len(batch)):
        ids, teacher = batch.tokens[row], batch.reference_tokens[row]
        assert teacher.prompt[teacher.prompt_mask].tolist() == [1, 2, *ids.prompt[ids.prompt_mask].tolist()]
    split = next(one for group in groups for one in group.completions if one.sequence_starts)
    split.sequence_starts[1] = SequenceStart(split.sequence_starts[1].start, (39, 39))
    with pytest.raises(ConfigError, match=r"set policy\.teacher_prompt=null"):
        collate(groups)
