"""The objective on plain tensors. Fields of `PolicyConfig` pick small functions; no preset is known here.

loss = aggregate(weight * policy term) + kl_coef * KL(ref) + kl_inference_coef * KL(inference)
       - entropy_coef * entropy

N responses, R positions. `docs/objectives.md` has the formulas.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import torch
from torch import Tensor

from config.policy import PolicyConfig
from training.aggregation import BatchTotals, aggregate
from training.kl import kl_estimate
from training.loss_metrics import Metrics, effective_sample_size_of, maximum_of, means_of

Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class _Tokens:
    """The batch, [N, R] each (advantage too); zeros (ratio: ones) stand outside the loss where it matters.

    log_prob: with gradient. old, sample, ref: other log-probs of the same tokens, without. mask: in the loss.
    inside: what is summed, `mask` unless `read_padding`. log_ratio: of each token, log_prob - old, with
    gradient. ratio: by `policy.ratio`, with gradient. entropy: over the vocabulary, or None.
    """

    log_prob: Tensor
    sample: Tensor
    old: Tensor
    ref: Tensor | None
    advantage: Tensor
    mask: Tensor
    inside: Tensor
    log_ratio: Tensor
    ratio: Tensor
    entropy: Tensor | None


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
    totals: BatchTotals | None = None,
) -> tuple[dict[str, Tensor], Metrics]:
    """The terms of the loss by the names of their metrics, and metrics as accumulators (see `training.loss_metrics`).

    log_prob: [N, R], the trainer's, with gradient. sample_log_prob: [N, R], the engine's.
    old_log_prob: [N, R], the trainer's before the first update on this batch, for `old_log_prob=trainer`;
        None stands for `log_prob` itself, which is right while the weights have not moved since.
    ref_log_prob: [N, R] or None. advantage: [N, 1] or [N, R]. mask: [N, R], the positions in the loss.
    entropy: [N, R] over the vocabulary, for `entropy_form=full`; without an `entropy_coef` only a metric.
    totals: of the global batch, for these rows; None: these rows are the global batch.

    Half-precision inputs are computed in float32. Positions outside `mask` may hold anything, NaN included.

    Raises:
        ValueError: a tensor that the policy's fields ask for is missing.
    """
    mask = mask.bool()
    totals = BatchTotals.of(policy, mask) if totals is None else totals
    tokens = _tokens(policy, log_prob, sample_log_prob, old_log_prob, ref_log_prob, advantage, mask, entropy)
    weight = _mismatch_weight(policy, tokens)
    term = weight * _not_skipped(policy, tokens) * POLICY_TERMS[policy.objective](policy, tokens)
    term = torch.where(tokens.inside, term, 0.0)

    terms = {"loss/objective": aggregate(policy, policy.aggregation, term, mask, totals)}
    terms |= _kl_terms(policy, tokens, totals)
    terms |= _entropy_term(policy, tokens, totals)
    metrics = _ratio_metrics(policy, tokens) | _divergence_metrics(policy, tokens, weight)
    metrics |= {name: term.detach().double().reshape(1) for name, term in terms.items()}
    return terms, metrics


def _summed(
    terms_of: Callable[Arguments, tuple[dict[str, Tensor], Metrics]],
) -> Callable[Arguments, tuple[Tensor, Metrics]]:
    def objective(*given: Arguments.args, **named: Arguments.kwargs) -> tuple[Tensor, Metrics]:
        terms, metrics = terms_of(*given, **named)
        return torch.stack(list(terms.values())).sum(), metrics

    return objective


objective = _summed(loss_terms)
"""The loss to minimise, and its metrics: the sum of `loss_terms`, which has the arguments."""


def _tokens(
    policy: PolicyConfig,
    log_prob: Tensor,
    sample_log_prob: Tensor,
    old_log_prob: Tensor | None,
    ref_log_prob: Tensor | None,
    advantage: Tensor,
    mask: Tensor,
    entropy: Tensor | None,
) -> _Tokens:
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    inside = torch.ones_like(mask) if policy.read_padding else mask

    def clean(values: Tensor) -> Tensor:
        return torch.where(inside, values.to(dtype), 0.0)

    log_prob = clean(log_prob)
    sample = clean(sample_log_prob.detach())
    if policy.old_log_prob == "engine":
        old = sample
    else:
        old = log_prob.detach() if old_log_prob is None else clean(old_log_prob.detach())
    log_ratio = log_prob - old
    chosen = LOG_RATIOS[policy.ratio](log_ratio, mask)
    if policy.log_ratio_min is not None or policy.log_ratio_max is not None:
        chosen = chosen.clamp(policy.log_ratio_min, policy.log_ratio_max)
    if policy.entropy_form == "sampled":
        entropy = -log_prob.exp() * log_prob
    return _Tokens(
        log_prob=log_prob,
        sample=sample,
        old=old,
        ref=None if ref_log_prob is None else clean(ref_log_prob.detach()),
        advantage=clean(advantage.detach().expand_as(mask)),
        mask=mask,
        inside=inside,
        log_ratio=log_ratio,
        ratio=chosen.exp(),
        entropy=None if entropy is None else clean(entropy),
    )


def _sequence_mean(values: Tensor, mask: Tensor, epsilon: float = 0.0) -> Tensor:
    """Mean over each row's tokens, [N, 1]; 0 for a row without any."""
    total = torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)
    return total / (mask.sum(dim=1, keepdim=True).clamp_min(1) + epsilon)


def _sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return _sequence_mean(log_ratio, mask).expand_as(log_ratio)


def _sequence_token_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio - log_ratio.detach() + _sequence_log_ratio(log_ratio, mask).detach()


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio,
    "sequence": _sequence_log_ratio,
    "sequence_token": _sequence_token_log_ratio,
    "none": lambda log_ratio, mask: torch.zeros_like(log_ratio),
}


def _clipped(policy: PolicyConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - policy.clip_epsilon_low, 1 + policy.clip_epsilon_high)


def _clip(policy: PolicyConfig, tokens: _Tokens) -> Tensor:
    advantage = tokens.advantage
    ratio = tokens.ratio if policy.ratio_max is None else tokens.ratio.clamp(max=policy.ratio_max)
    loss = -torch.minimum(ratio * advantage, _clipped(policy, tokens.ratio) * advantage)
    if policy.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -policy.dual_clip * advantage), loss)


def _soft_clip(policy: PolicyConfig, tokens: _Tokens) -> Tensor:
    positive = tokens.ratio.new_tensor(policy.soft_clip_temperature_positive)
    negative = tokens.ratio.new_tensor(policy.soft_clip_temperature_negative)
    temperature = torch.where(tokens.advantage > 0, positive, negative)
    gate = torch.sigmoid(temperature * (tokens.ratio - 1)) * 4 / temperature
    return -gate * tokens.advantage


def _geometric(policy: PolicyConfig, tokens: _Tokens) -> Tensor:
    sign = tokens.advantage.sign()
    log_ratio = tokens.log_ratio
    clipped = log_ratio.clamp(-policy.clip_epsilon_low, policy.clip_epsilon_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = _sequence_mean(pessimistic, tokens.mask, policy.length_epsilon).exp()
    advantage = _sequence_mean(tokens.advantage, tokens.mask, policy.length_epsilon)
    return (-ratio * advantage).expand_as(log_ratio)


def _unclipped(policy: PolicyConfig, tokens: _Tokens) -> Tensor:
    return -(tokens.log_prob if policy.ratio == "none" else tokens.ratio) * tokens.advantage


POLICY_TERMS: dict[str, Callable[[PolicyConfig, _Tokens], Tensor]] = {
    "clip": _clip,
    "cispo": lambda policy, tokens: (
        -_clipped(policy, tokens.ratio).detach() * tokens.advantage * tokens.log_prob
    ),
    "clamp": lambda policy, tokens: -_clipped(policy, tokens.ratio) * tokens.advantage,
    "soft_clip": _soft_clip,
    "geometric": _geometric,
    "none": _unclipped,
}


PROPORTIONAL = frozenset({"clip", "cispo", "clamp", "soft_clip", "geometric", "none"})
"""Policy terms that are something finite times the advantage of the token's row."""


def teaching_rows(policy: PolicyConfig, advantage: Tensor, mask: Tensor) -> Tensor:
    """bool [N]: the rows whose gradient need not be zero.

    It is zero where the advantage is, if nothing but a `PROPORTIONAL` policy term has a gradient.

    advantage: [N, 1] or [N, R]. mask: bool [N, R], the tokens in the loss.
    """
    kl_coef = policy.kl_coef if policy.kl_placement == "loss" else 0.0
    if policy.objective not in PROPORTIONAL or kl_coef or policy.kl_inference_coef or policy.entropy_coef:
        return torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    return (advantage != 0).any(1) & mask.any(1)


def _mismatch_weight(policy: PolicyConfig, tokens: _Tokens) -> Tensor:
    """exp(old - engine) per token, [N, R], truncated or masked; ones for `mismatch=none`."""
    difference = tokens.old - tokens.sample
    if policy.mismatch == "none":
        return torch.ones_like(difference)
    weight = MISMATCH_LEVELS[policy.mismatch_level](difference, tokens.mask).exp()
    cap = float("inf") if policy.mismatch_cap is None else policy.mismatch_cap
    weight = MISMATCH_BOUNDS[policy.mismatch](weight, cap, policy.mismatch_floor)
    if policy.objective == "geometric":
        log_weight = _sequence_mean((weight + 1e-10).log(), tokens.mask, policy.length_epsilon)
        return log_weight.exp().expand_as(difference)
    return weight


MISMATCH_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda difference, mask: difference,
    "sequence": lambda difference, mask: (
        torch.where(mask, difference, 0.0).sum(dim=1, keepdim=True).expand_as(difference)
    ),
    "sequence_mean": _sequence_log_ratio,
}
MISMATCH_BOUNDS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "truncate": lambda weight, cap, floor: weight.clamp(max=cap),
    "mask": lambda weight, cap, floor: torch.where((weight <= cap) & (weight >= floor), weight, 0.0),
}


def _not_skipped(policy: PolicyConfig, tokens: _Tokens) -> Tensor:
    """[N, 1] or scalar: 0 for the sequences that `skip_threshold` leaves out."""
    if policy.skip_threshold is None:
        return tokens.ratio.new_ones(())
    mean_ratio = _sequence_mean(tokens.ratio.detach(), tokens.mask)
    return (mean_ratio <= policy.skip_threshold).to(tokens.ratio.dtype)


def _kl_terms(policy: PolicyConfig, tokens: _Tokens, totals: BatchTotals) -> dict[str, Tensor]:
    how = policy.aggregation if policy.kl_aggregation == "same" else policy.kl_aggregation
    terms: dict[str, Tensor] = {}
    if policy.kl_coef and policy.kl_placement == "loss":
        if tokens.ref is None:
            raise ValueError(f"policy.kl_coef={policy.kl_coef} needs ref_log_prob")
        estimate = kl_estimate(policy, tokens.log_prob, tokens.ref, tokens.inside)
        terms["loss/kl"] = policy.kl_coef * aggregate(policy, how, estimate, tokens.mask, totals)
    if policy.kl_inference_coef:
        estimate = kl_estimate(policy, tokens.log_prob, tokens.sample, tokens.inside)
        aggregated = aggregate(policy, how, estimate, tokens.mask, totals)
        terms["loss/kl_inference"] = policy.kl_inference_coef * aggregated
    return terms


def _entropy_term(policy: PolicyConfig, tokens: _Tokens, totals: BatchTotals) -> dict[str, Tensor]:
    if not policy.entropy_coef:
        return {}
    if tokens.entropy is None:
        raise ValueError(f"policy.entropy_coef={policy.entropy_coef} needs the entropy over the vocabulary")
    aggregated = aggregate(policy, policy.aggregation, tokens.entropy, tokens.mask, totals)
    return {"loss/entropy": -policy.entropy_coef * aggregated}


@torch.no_grad()
def _ratio_metrics(policy: PolicyConfig, tokens: _Tokens) -> Metrics:
    """The clip fractions count tokens whose clip binds, that is, whose gradient it changes."""
    low, high = CLIP_BINDS[policy.objective](policy, tokens)
    means = {"loss/clip_fraction_low": low, "loss/clip_fraction_high": high, "ratio/mean": tokens.ratio}
    return means_of(means, tokens.mask) | {
        "ratio/max": maximum_of(tokens.ratio, tokens.mask),
        "ess": effective_sample_size_of(tokens.log_ratio, tokens.mask),
    }


def _binds_by_sign(policy: PolicyConfig, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    low, high = _binds_always(policy, tokens)
    return low & (tokens.advantage < 0), high & (tokens.advantage > 0)


def _binds_always(policy: PolicyConfig, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    return tokens.ratio < 1 - policy.clip_epsilon_low, tokens.ratio > 1 + policy.clip_epsilon_high


def _binds_in_log_space(policy: PolicyConfig, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    low = tokens.log_ratio < -policy.clip_epsilon_low
    high = tokens.log_ratio > policy.clip_epsilon_high
    return low & (tokens.advantage < 0), high & (tokens.advantage > 0)


def _binds_never(policy: PolicyConfig, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    never = torch.zeros_like(tokens.mask)
    return never, never


CLIP_BINDS: dict[str, Callable[[PolicyConfig, _Tokens], tuple[Tensor, Tensor]]] = {
    "clip": _binds_by_sign,
    "cispo": _binds_always,
    "clamp": _binds_always,
    "soft_clip": _binds_never,
    "geometric": _binds_in_log_space,
    "none": _binds_never,
}


@torch.no_grad()
def _divergence_metrics(policy: PolicyConfig, tokens: _Tokens, weight: Tensor) -> Metrics:
    """`kl/...` by the policy's estimator; `mismatch/gap`: mean |old - engine|; `mismatch/capped`: share of
    tokens whose weight is at the cap or masked out."""
    others = {"inference": tokens.sample} | ({} if tokens.ref is None else {"ref": tokens.ref})
    means = {
        f"kl/{name}": kl_estimate(policy, tokens.log_prob, other, tokens.mask)
        for name, other in others.items()
    }
    if tokens.entropy is not None:
        means["entropy"] = tokens.entropy
    if policy.old_log_prob == "trainer":
        means["mismatch/gap"] = (tokens.old - tokens.sample).abs()
    if policy.mismatch != "none":
        cap = float("inf") if policy.mismatch_cap is None else policy.mismatch_cap
        means["mismatch/capped"] = (weight >= cap) | (weight == 0)
    return means_of(means, tokens.mask)
