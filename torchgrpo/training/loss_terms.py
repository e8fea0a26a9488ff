"""Computes a microbatch's aggregated loss terms and their metrics from log-probs and advantages.

Fields of `PolicyConfig` select the functions; nothing here depends on a preset.

loss = aggregate(weight * policy term + penalty * |log ratio|) + kl_coef * KL(ref)
       + kl_inference_coef * KL(inference) - entropy_coef * entropy
       - environment_coef * mean log-prob of the environment's tokens

N token sequences, R positions. `docs/objectives.md` has the formulas.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.batches.episodes import EpisodeRows
from torchgrpo.training.aggregation import BatchTotals, aggregate
from torchgrpo.training.kl import kl_estimate
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.loss_metrics import (
    Metrics,
    effective_sample_size_accumulator,
    maximum_accumulator,
    mean_accumulators,
)
from torchgrpo.training.policy_terms import policy_term
from torchgrpo.training.token_weights import TokenWeights, mismatch_capped, token_weights


def loss_terms(
    policy: PolicyConfig,
    log_prob: Tensor,
    sample_log_prob: Tensor,
    old_log_prob: Tensor | None,
    ref_log_prob: Tensor | None,
    advantage: Tensor,
    mask: Tensor,
    *,
    entropy: Tensor | None = None,
    environment: Tensor | None = None,
    totals: BatchTotals | None = None,
    weights: TokenWeights | None = None,
    episodes: EpisodeRows | None = None,
) -> tuple[dict[str, Tensor], Metrics, Tensor]:
    """Computes the loss terms by metric name, their metrics, and the total advantage.

    The metrics are accumulators (see `training/loss_metrics.py`). The returned advantage [N, R] is the one used
    by the terms; it has no gradient and includes the teacher's advantage.

    log_prob: [N, R], of the trainer, with gradient. sample_log_prob: [N, R], of the engine.
    old_log_prob: [N, R], of the trainer before the first update on this batch, for `old_log_prob=trainer`; None
        stands for `log_prob` itself, which is correct while the weights have not changed since.
    ref_log_prob: [N, R], of the reference model or the teacher, or None. advantage: [N, 1] or [N, R], of the
    reward.
    mask: [N, R], the positions in the loss.
    entropy: [N, R] over the vocabulary, for `entropy_form=full`; without an `entropy_coef` only a metric.
    environment: bool [N, R], environment tokens, for which `log_prob` is then needed too; None: there are none.
    totals: totals of the global batch, for these rows; None: these rows are the global batch.
    episodes: rows of each completion; None: each row is a completion.
    weights: weights of these rows' tokens that depend on the whole global batch; `mask` must then lack the
        tokens that `policy.masked_in_denominator=false` leaves out. None: the weights follow from these rows
        alone.

    Half-precision inputs are computed in float32. Positions outside `mask` may have any value, NaN included.

    Raises:
        ValueError: a tensor that the policy needs is missing.
    """
    log_probs_and_advantage = log_prob, sample_log_prob, old_log_prob, ref_log_prob, advantage
    mask = mask.bool()
    inputs = LossInputs.from_tensors(policy, *log_probs_and_advantage, mask, entropy, episodes)
    total_advantage = inputs.advantage  # includes dropped tokens
    if weights is None:
        weights = token_weights(policy, inputs)
        if not policy.masked_in_denominator:
            mask = weights.kept_mask
            inputs = LossInputs.from_tensors(policy, *log_probs_and_advantage, mask, entropy, episodes)
    totals = BatchTotals.from_mask(policy, mask, environment, episodes) if totals is None else totals
    term = weights.policy * policy_term(policy).loss(policy, inputs)
    if weights.penalty is not None:
        term = term + weights.penalty * inputs.log_ratio.abs()
    term = torch.where(inputs.sum_mask, term, 0.0)

    terms = {"loss/objective": aggregate(policy, policy.aggregation, term, mask, totals)}
    terms |= _added_terms(policy, inputs, log_prob, environment, totals)
    metrics = _metrics(policy, inputs, weights)
    metrics |= {name: term.detach().double().reshape(1) for name, term in terms.items()}
    return terms, metrics, total_advantage


def total_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, Metrics]:
    """Computes the loss to minimise, the sum of `loss_terms`, and its metrics.

    The arguments are those of `loss_terms`.
    """
    terms, metrics, _ = loss_terms(*args, **kwargs)
    return torch.stack(list(terms.values())).sum(), metrics


def _added_terms(
    policy: PolicyConfig, inputs: LossInputs, log_prob: Tensor, environment: Tensor | None, totals: BatchTotals
) -> dict[str, Tensor]:
    """Computes the terms beside the policy term: KL, entropy and environment tokens."""
    kl_aggregation = policy.aggregation if policy.kl_aggregation == "same" else policy.kl_aggregation
    terms: dict[str, Tensor] = {}
    if policy.kl_coef and policy.kl_placement == "loss":
        if inputs.ref_log_prob is None:
            raise ValueError(f"policy.kl_coef={policy.kl_coef} needs ref_log_prob")
        importance = KL_IMPORTANCE[policy.kl_importance](inputs)
        estimate = kl_estimate(policy, inputs.log_prob, inputs.ref_log_prob, inputs.sum_mask, importance)
        terms["loss/kl"] = policy.kl_coef * aggregate(policy, kl_aggregation, estimate, inputs.mask, totals)
    if policy.kl_inference_coef:
        estimate = kl_estimate(policy, inputs.log_prob, inputs.sample_log_prob, inputs.sum_mask)
        aggregated = aggregate(policy, kl_aggregation, estimate, inputs.mask, totals)
        terms["loss/kl_inference"] = policy.kl_inference_coef * aggregated
    if policy.entropy_coef:
        if inputs.entropy is None:
            raise ValueError(f"policy.entropy_coef={policy.entropy_coef} needs the entropy over the vocabulary")
        aggregated = aggregate(policy, policy.aggregation, inputs.entropy, inputs.mask, totals)
        terms["loss/entropy"] = -policy.entropy_coef * aggregated
    if environment is not None and policy.environment_coef:
        # Divided by their own number of tokens, so that they do not dilute the other terms (ECHO, prime-rl).
        log_prob_sum = torch.where(environment, log_prob, 0.0).sum()
        mean = -policy.environment_coef * log_prob_sum / max(totals.environment_tokens, 1)
        terms["loss/env_token_nll"] = mean
    return terms


KL_IMPORTANCE: dict[str, Callable[[LossInputs], Tensor | None]] = {
    "none": lambda inputs: None,
    "ratio": lambda inputs: inputs.ratio,
    "engine_ratio": lambda inputs: (inputs.log_prob - inputs.sample_log_prob).exp(),
    "score": lambda inputs: (inputs.log_prob - inputs.log_prob.detach()).exp(),
}
"""Factor of the KL to the reference, with gradient, [N, R]."""


@torch.no_grad()
def _metrics(policy: PolicyConfig, inputs: LossInputs, weights: TokenWeights) -> Metrics:
    """Computes metrics of the ratio and of the distances between policy, engine and reference model.

    The clip fractions count tokens whose clip binds, that is, changes the gradient. `kl/...`: the policy's
    estimator. `logprob_diff/mean`: mean |old - engine|. `mismatch/capped`: share of tokens whose weight is at
    the cap or masked out. `loss/masked_fraction`: share of tokens without a policy term. `distill/...`: mean
    and mean absolute value of the teacher's advantages.
    """
    low, high = policy_term(policy).clip_binds(policy, inputs)
    means = {"loss/clip_fraction_low": low, "loss/clip_fraction_high": high, "ratio/mean": inputs.ratio}
    metrics = mean_accumulators(means, inputs.mask) | {
        "ratio/max": maximum_accumulator(inputs.ratio, inputs.mask),
        "ess": effective_sample_size_accumulator(inputs.log_ratio, inputs.mask),
    }
    others = {"inference": inputs.sample_log_prob}
    if inputs.ref_log_prob is not None:
        others["ref" if inputs.teacher_advantage is None else "teacher"] = inputs.ref_log_prob
    means = {f"kl/{name}": kl_estimate(policy, inputs.log_prob, other, inputs.mask) for name, other in others.items()}
    if inputs.teacher_advantage is not None:
        means |= {"distill/mean": inputs.teacher_advantage, "distill/abs_mean": inputs.teacher_advantage.abs()}
    if inputs.entropy is not None:
        means["entropy"] = inputs.entropy
    if policy.old_log_prob == "trainer":
        means["logprob_diff/mean"] = (inputs.old_log_prob - inputs.sample_log_prob).abs()
    if policy.mismatch != "none":
        means["mismatch/capped"] = mismatch_capped(policy, inputs)
    if policy.trust_regions or policy.select_tokens != "none":
        means["loss/masked_fraction"] = weights.policy == 0
    return metrics | mean_accumulators(means, inputs.mask)
