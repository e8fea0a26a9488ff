"""The presets' losses once more, in plain Python floats, each written out from its paper or its system.

Nothing is shared with torchgrpo/training/loss.py. `fixed` holds the log-probs that a stop-gradient sees, so that finite
differences of `now` alone give the gradient.
"""

from collections.abc import Callable
from math import exp, log, prod

import torch

Rows = list[list[float]]


class Batch:
    """Rows of unequal length, without padding: log-probs by token, one advantage a row."""

    def __init__(self, now: Rows, engine: Rows, trainer: Rows, ref: Rows, advantage: list[float], width: int):
        self.now, self.fixed, self.engine, self.trainer, self.ref = now, now, engine, trainer, ref
        self.advantage, self.width = advantage, width
        self.entropy: Rows = []

    def tokens(self) -> list[tuple[int, int]]:
        return [(row, t) for row, tokens in enumerate(self.now) for t in range(len(tokens))]


def ppo(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss


def k3(now: float, ref: float) -> float:
    return exp(ref - now) - (ref - now) - 1


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def clip_by_token(b: Batch, low: float, high: float, kl: float, dual: float | None = None) -> Rows:
    return [
        [
            ppo(exp(now - b.engine[row][t]), b.advantage[row], low, high, dual) + kl * k3(now, b.ref[row][t])
            for t, now in enumerate(tokens)
        ]
        for row, tokens in enumerate(b.now)
    ]


def token_mean(rows: Rows) -> float:
    return mean([value for row in rows for value in row])


def grpo(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.001))


def dapo(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.28, 0.0))


def dr_grpo(b: Batch) -> float:
    return sum(map(sum, clip_by_token(b, 0.2, 0.2, 0.0))) / (len(b.now) * b.width)


def ppo_dual_clip(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.001, dual=3.0))


def gspo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.now):
        if tokens:
            ratio = exp(mean([now - old for now, old in zip(tokens, b.engine[row], strict=True)]))
            losses.append(ppo(ratio, b.advantage[row], 3e-4, 4e-4))
    return mean(losses)


def cispo(b: Batch) -> float:
    return mean(
        [
            -min(max(exp(b.fixed[row][t] - b.engine[row][t]), 0.0), 5.0) * b.advantage[row] * b.now[row][t]
            for row, t in b.tokens()
        ]
    )


def reinforce(b: Batch) -> float:
    return mean([-b.advantage[row] * b.now[row][t] for row, t in b.tokens()])


def compat_megatron(b: Batch) -> float:
    return mean(
        [
            ppo(exp(b.now[row][t] - b.trainer[row][t]), b.advantage[row], 0.01, 0.01)
            + 0.001 * k3(b.now[row][t], b.ref[row][t])
            for row, t in b.tokens()
        ]
    )


def compat_coati_grpo(b: Batch) -> float:
    rows = clip_by_token(b, 0.2, 0.2, 0.01)
    return sum(sum(row) / (len(row) + 1e-8) for row in rows) / len(rows)


def compat_nanochat(b: Batch) -> float:
    passes = [range(start, min(start + 8, len(b.now))) for start in range(0, len(b.now), 8)]
    return mean(
        [mean([-b.advantage[row] * now for row in rows for now in b.now[row]]) for rows in passes],
    )


def compat_trl(b: Batch) -> float:
    total = 0.0
    for row, tokens in enumerate(b.now):
        weight = prod(exp(old - engine) for old, engine in zip(b.trainer[row], b.engine[row], strict=True))
        for t, now in enumerate(tokens):
            total += (weight if weight <= 3 else 0.0) * ppo(
                exp(now - b.trainer[row][t]), b.advantage[row], 0.2, 0.2
            )
    return total / len(b.tokens())


def compat_verl(b: Batch) -> float:
    return mean(
        [
            ppo(exp(b.now[row][t] - b.trainer[row][t]), b.advantage[row], 0.2, 0.2, dual=3.0)
            + 0.001 * k3(b.now[row][t], b.ref[row][t])
            for row, t in b.tokens()
        ]
    )


def compat_torchrl(b: Batch) -> float:
    kl = sum(k3(b.now[row][t], b.engine[row][t]) for row, t in b.tokens()) / (len(b.now) * b.width)
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.0)) + 0.01 * kl


def dppo(b: Batch) -> float:
    """-A r where the probability has not moved by more than 0.2 in the direction of A."""
    total = 0.0
    for row, t in b.tokens():
        moved = exp(b.fixed[row][t]) - exp(b.engine[row][t])
        kept = moved <= 0.2 if b.advantage[row] > 0 else moved >= -0.2
        total -= kept * b.advantage[row] * exp(b.now[row][t] - b.engine[row][t])
    return total / len(b.tokens())


def binary_kl(q: float, p: float, smallest: float = 0.0) -> float:
    return q * log(q / p) + (1 - q) * log((1 - q + smallest) / (1 - p + smallest))


def dppo_kl(b: Batch) -> float:
    total = 0.0
    for row, t in b.tokens():
        p, q = exp(b.fixed[row][t]), exp(b.engine[row][t])
        far = binary_kl(q, p, 1e-8) > 0.05
        away = p > q if b.advantage[row] > 0 else p < q
        total -= (not (far and away)) * b.advantage[row] * exp(b.now[row][t] - b.engine[row][t])
    return total / len(b.tokens())


def weighed(b: Batch, weight: Callable[[float, float], float]) -> float:
    """The clipped term by the trainer's ratio, times a weight of (trainer's, engine's log-prob)."""
    terms = []
    for row, t in b.tokens():
        old = b.trainer[row][t]
        term = ppo(exp(b.now[row][t] - old), b.advantage[row], 0.2, 0.2)
        terms.append(weight(old, b.engine[row][t]) * term)
    return mean(terms)


def icepop(b: Batch) -> float:
    def weight(old: float, engine: float) -> float:
        return exp(old - engine) if 0.5 <= exp(old - engine) <= 5.0 else 0.0

    return weighed(b, weight)


def kpop(b: Batch) -> float:
    def weight(old: float, engine: float) -> float:
        p, q = (min(max(exp(each), 1e-8), 1 - 1e-8) for each in (old, engine))
        return exp(old - engine) if max(binary_kl(q, p), binary_kl(p, q)) <= 0.1 else 0.0

    return weighed(b, weight)


def opsm(b: Batch) -> float:
    rows = clip_by_token(b, 0.2, 0.2, 0.0)
    for row, tokens in enumerate(b.fixed):
        drift = mean([old - now for old, now in zip(b.engine[row], tokens, strict=True)])
        if b.advantage[row] < 0 and drift > 0.1:
            rows[row] = [0.0] * len(tokens)
    return token_mean(rows)


def maxrl(b: Batch) -> float:
    return mean([-b.advantage[row] * exp(b.now[row][t] - b.engine[row][t]) for row, t in b.tokens()])


def clipped(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.0))


def sapo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.now):
        advantage = b.advantage[row]
        tau = 1.0 if advantage > 0 else 1.05
        gates = [
            4 / tau / (1 + exp(-tau * (exp(now - old) - 1)))
            for now, old in zip(tokens, b.engine[row], strict=True)
        ]
        losses += [-advantage * mean(gates)] if tokens else []
    return mean(losses)


def gmpo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.now):
        sign = 1 if b.advantage[row] > 0 else -1
        logs = [now - old for now, old in zip(tokens, b.engine[row], strict=True)]
        held = [sign * min(sign * each, sign * min(max(each, -0.4), 0.4)) for each in logs]
        losses.append(-exp(mean(held)) * b.advantage[row] if tokens else 0.0)
    return mean(losses)


def luspo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.now):
        ratio = exp(mean([now - old for now, old in zip(tokens, b.engine[row], strict=True)]))
        losses.append(len(tokens) * ppo(ratio, b.advantage[row], 2e-3, 2.5e-3))
    return mean(losses)


def vespo(b: Batch) -> float:
    total = 0.0
    for row, tokens in enumerate(b.fixed):
        log_w = sum(now - old for now, old in zip(tokens, b.engine[row], strict=True))
        power, slope = (2, 3) if b.advantage[row] >= 0 else (3, 2)
        phi = exp(slope + power * log_w - slope * exp(log_w))
        total -= phi * b.advantage[row] * sum(b.now[row])
    return total / len(b.tokens())


def covariances(b: Batch) -> dict[tuple[int, int], float]:
    places = b.tokens()
    middle = mean([b.advantage[row] for row, _ in places]), mean([b.fixed[row][t] for row, t in places])
    return {(row, t): (b.advantage[row] - middle[0]) * (b.fixed[row][t] - middle[1]) for row, t in places}


def clip_cov(b: Batch) -> float:
    """One token (of fewer than 10,000) is left out, if any is a candidate."""
    rows = clip_by_token(b, 0.2, 0.2, 0.0)
    candidates = []
    for (row, t), covariance in covariances(b).items():
        ratio, advantage = exp(b.fixed[row][t] - b.engine[row][t]), b.advantage[row]
        binds = (ratio < 0.8 and advantage < 0) or (ratio > 1.2 and advantage > 0)
        candidates += [(row, t)] if 1.0 < covariance < 5.0 and not binds else []
    for row, t in shuffled(candidates)[:1]:
        rows[row][t] = 0.0
    return token_mean(rows)


def shuffled(candidates: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In the fixed order that the loss takes them in."""
    generator = torch.Generator().manual_seed(len(candidates))
    return [candidates[place] for place in torch.randperm(len(candidates), generator=generator).tolist()]


def kl_cov(b: Batch) -> float:
    """The one token (of fewer than 10,000) with the highest covariance is held back; of equal ones, topk's."""
    found = covariances(b)
    first = torch.tensor(list(found.values()), dtype=torch.float64).topk(1).indices
    highest = list(found)[int(first)]
    total = 0.0
    for row, t in b.tokens():
        moved = b.now[row][t] - b.engine[row][t]
        total -= b.advantage[row] * exp(moved)
        total += abs(moved) if (row, t) == highest else 0.0
    return total / len(b.tokens())


def high_entropy(b: Batch) -> float:
    values = sorted(value for row in b.entropy for value in row)
    place = 0.8 * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    threshold = values[below] + (place - below) * (values[above] - values[below])
    rows = clip_by_token(b, 0.2, 0.28, 0.0)
    return mean([rows[row][t] if b.entropy[row][t] >= threshold else 0.0 for row, t in b.tokens()])


def unbiased_kl(b: Batch) -> float:
    rows = clip_by_token(b, 0.2, 0.2, 0.0)
    return mean(
        [
            rows[row][t] + 0.001 * k3(b.now[row][t], b.ref[row][t]) * exp(b.now[row][t] - b.engine[row][t])
            for row, t in b.tokens()
        ]
    )


def opd(b: Batch) -> float:
    """The teacher's log-prob less the policy's, held, is each token's advantage."""
    return mean(
        [
            ppo(exp(b.now[row][t] - b.engine[row][t]), b.ref[row][t] - b.fixed[row][t], 0.2, 0.2)
            for row, t in b.tokens()
        ]
    )


PLAIN: dict[str, Callable[[Batch], float]] = {
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": reinforce,
    "reinforce": reinforce,
    "ppo_dual_clip": ppo_dual_clip,
    "compat_megatron": compat_megatron,
    "compat_coati_grpo": compat_coati_grpo,
    "compat_coati_dapo": dapo,
    "compat_nanochat": compat_nanochat,
    "compat_trl": compat_trl,
    "compat_verl": compat_verl,
    "compat_torchrl": compat_torchrl,
    "dppo": dppo,
    "dppo_kl": dppo_kl,
    "icepop": icepop,
    "mis_sequence": compat_trl,
    "kpop": kpop,
    "opsm": opsm,
    "maxrl": maxrl,
    "gdpo": clipped,
    "pass_at_k": clipped,
    "reinforce_pp": clipped,
    "reinforce_pp_baseline": clipped,
    "adaptive_entropy": clipped,
    "echo": clipped,
    "sapo": sapo,
    "gmpo": gmpo,
    "luspo": luspo,
    "vespo": vespo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "high_entropy": high_entropy,
    "unbiased_kl": unbiased_kl,
    "opd": opd,
    "opsd": opd,
}


def gradient(loss: Callable[[Batch], float], batch: Batch, step: float = 1e-5) -> Rows:
    """Central differences in every log-prob of `now`, with `fixed` held."""
    slopes = [[0.0] * len(row) for row in batch.now]
    start = [list(row) for row in batch.now]
    batch.fixed = start
    for row, t in batch.tokens():
        around = []
        for shift in (step, -step):
            batch.now = [list(values) for values in start]
            batch.now[row][t] += shift
            around.append(loss(batch))
        slopes[row][t] = (around[0] - around[1]) / (2 * step)
        batch.now = start
    return slopes
