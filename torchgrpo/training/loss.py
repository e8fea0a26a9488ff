"""The objective on plain tensors. Fields of `PolicyConfig` pick small functions; no preset is known here.

loss = aggregate(weight * policy term + penalty * |log ratio|) + kl_coef * KL(ref) + kl_inference_coef * KL(inference)
       - entropy_coef * entropy - environment_coef * mean log-prob of the environment's tokens

N responses, R positions. `docs/objectives.md` has the formulas.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.aggregation import BatchTotals, aggregate
from torchgrpo.training.kl import kl_estimate
from torchgrpo.training.loss_inputs import LossInputs
from torchgrpo.training.loss_metrics import Metrics, effective_sample_size_of, maximum_of, means_of
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
) -> tuple[dict[str, Tensor], Metrics, Tensor]:
    """The terms of the loss by the names of their metrics, metrics, and the advantage.

    The metrics are accumulators (see `training/loss_metrics.py`). The advantage [N, R] is the one that the terms are
    computed with, a teacher's part included, without gradient.

    log_prob: [N, R], the trainer's, with gradient. sample_log_prob: [N, R], the engine's.
    old_log_prob: [N, R], the trainer's before the first update on this batch, for `old_log_prob=trainer`;
        None stands for `log_prob` itself, which is right while the weights have not moved since.
    ref_log_prob: [N, R], the reference's or the teacher's, or None. advantage: [N, 1] or [N, R], the reward's.
    mask: [N, R], the positions in the loss.
    entropy: [N, R] over the vocabulary, for `entropy_form=full`; without an `entropy_coef` only a metric.
    environment: bool [N, R], the tokens that the environment wrote, of which `log_prob` then says something too; None:
        there are none.
    totals: of the global batch, for these rows; None: these rows are the global batch.
    weights: of these rows' tokens, where they depend on the rest of the global batch, whose `mask` then lacks what
        `policy.count_dropped=false` leaves out; None: of these rows alone.

    Half-precision inputs are computed in float32. Positions outside `mask` may hold anything, NaN included.

    Raises:
        ValueError: a tensor that the policy's fields ask for is missing.
    """
    given = log_prob, sample_log_prob, old_log_prob, ref_log_prob, advantage
    mask = mask.bool()
    inputs = LossInputs.of(policy, *given, mask, entropy)
    total_advantage = inputs.advantage  # of dropped tokens too
    if weights is None:
        weights = token_weights(policy, inputs)
        if not policy.count_dropped:
            mask = weights.kept
            inputs = LossInputs.of(policy, *given, mask, entropy)
    totals = BatchTotals.of(policy, mask, environment) if totals is None else totals
    term = weights.policy * policy_term(policy).loss(policy, inputs)
    if weights.penalty is not None:
        term = term + weights.penalty * inputs.log_ratio.abs()
    term = torch.where(inputs.inside, term, 0.0)

    terms = {"loss/objective": aggregate(policy, policy.aggregation, term, mask, totals)}
    terms |= _added_terms(policy, inputs, log_prob, environment, totals)
    metrics = _metrics(policy, inputs, weights)
    metrics |= {name: term.detach().double().reshape(1) for name, term in terms.items()}
    return terms, metrics, total_advantage


def objective(*given: Any, **named: Any) -> tuple[Tensor, Metrics]:
    """The loss to minimise, and its metrics: the sum of `loss_terms`, which has the arguments."""
    terms, metrics, _ = loss_terms(*given, **named)
    return torch.stack(list(terms.values())).sum(), metrics


def _added_terms(
    policy: PolicyConfig,
    inputs: LossInputs,
    log_prob: Tensor,
    environment: Tensor | None,
    totals: BatchTotals,
) -> dict[str, Tensor]:
    how = policy.aggregation if policy.kl_aggregation == "same" else policy.kl_aggregation
    terms: dict[str, Tensor] = {}
    if policy.kl_coef and policy.kl_placement == "loss":
        if inputs.ref is None:
            raise ValueError(f"policy.kl_coef={policy.kl_coef} needs ref_log_prob")
        importance = KL_IMPORTANCE[policy.kl_importance](inputs)
        estimate = kl_estimate(policy, inputs.log_prob, inputs.ref, inputs.inside, importance)
        terms["loss/kl"] = policy.kl_coef * aggregate(policy, how, estimate, inputs.mask, totals)
    if policy.kl_inference_coef:
        estimate = kl_estimate(policy, inputs.log_prob, inputs.sample, inputs.inside)
        aggregated = aggregate(policy, how, estimate, inputs.mask, totals)
        terms["loss/kl_inference"] = policy.kl_inference_coef * aggregated
    if policy.entropy_coef:
        if inputs.entropy is None:
            raise ValueError(
                f"policy.entropy_coef={policy.entropy_coef} needs the entropy over the vocabulary"
            )
        aggregated = aggregate(policy, policy.aggregation, inputs.entropy, inputs.mask, totals)
        terms["loss/entropy"] = -policy.entropy_coef * aggregated
    if environment is not None and policy.environment_coef:
        # Over their own number of tokens, so that they do not dilute the rest (ECHO, prime-rl).
        foreseen = torch.where(environment, log_prob, 0.0).sum()
        mean = -policy.environment_coef * foreseen / max(totals.environment_tokens, 1)
        terms["loss/environment"] = mean
    return terms


KL_IMPORTANCE: dict[str, Callable[[LossInputs], Tensor | None]] = {
    "none": lambda inputs: None,
    "ratio": lambda inputs: inputs.ratio,
    "engine_ratio": lambda inputs: (inputs.log_prob - inputs.sample).exp(),
    "score": lambda inputs: (inputs.log_prob - inputs.log_prob.detach()).exp(),
}
"""What the KL to the reference is multiplied by, with its gradient, [N, R]."""


@torch.no_grad()
def _metrics(policy: PolicyConfig, inputs: LossInputs, weights: TokenWeights) -> Metrics:
    """Metrics of the ratio, and of the distances between policy, engine and frozen model.

    The clip fractions count tokens whose clip binds, that is, whose gradient it changes. `kl/...` is by the policy's
    estimator; `mismatch/gap` the mean |old - engine|; `mismatch/capped` the share of tokens whose weight is at the cap
    or masked out; `loss/tokens_dropped` of those without a policy term; `distill/...` mean and mean size of what a
    teacher adds to the advantages.
    """
    low, high = policy_term(policy).binds(policy, inputs)
    means = {"loss/clip_fraction_low": low, "loss/clip_fraction_high": high, "ratio/mean": inputs.ratio}
    metrics = means_of(means, inputs.mask) | {
        "ratio/max": maximum_of(inputs.ratio, inputs.mask),
        "ess": effective_sample_size_of(inputs.log_ratio, inputs.mask),
    }
    others = {"inference": inputs.sample}
    if inputs.ref is not None:
        others["ref" if inputs.distilled is None else "teacher"] = inputs.ref
    means = {
        f"kl/{name}": kl_estimate(policy, inputs.log_prob, other, inputs.mask)
        for name, other in others.items()
    }
    if inputs.distilled is not None:
        means |= {"distill/mean": inputs.distilled, "distill/size": inputs.distilled.abs()}
    if inputs.entropy is not None:
        means["entropy"] = inputs.entropy
    if policy.old_log_prob == "trainer":
        means["mismatch/gap"] = (inputs.old - inputs.sample).abs()
    if policy.mismatch != "none":
        means["mismatch/capped"] = mismatch_capped(policy, inputs)
    if policy.trust_regions or policy.select_tokens != "none":
        means["loss/tokens_dropped"] = weights.policy == 0
    return metrics | means_of(means, inputs.mask)
