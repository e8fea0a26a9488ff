"""Independent losses of the presets in plain Python floats, written from their papers or systems.

Nothing is shared with torchgrpo/training/loss_terms.py. `detached_log_prob` has the log-probs under a
stop-gradient, so that finite differences of `log_prob` alone give the gradient.
"""

from collections.abc import Callable
from math import exp, log, prod

import torch

Rows = list[list[float]]


class Batch:
    """Log-probs of rows of unequal length, without padding, with one advantage per row."""

    def __init__(self, log_prob: Rows, engine: Rows, trainer: Rows, ref: Rows, advantage: list[float], width: int):
        self.log_prob, self.detached_log_prob = log_prob, log_prob
        self.engine, self.trainer, self.ref = engine, trainer, ref
        self.advantage, self.width = advantage, width
        self.entropy: Rows = []

    def tokens(self) -> list[tuple[int, int]]:
        return [(row, t) for row, tokens in enumerate(self.log_prob) for t in range(len(tokens))]


def ppo(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss


def k3(log_prob: float, ref: float) -> float:
    return exp(ref - log_prob) - (ref - log_prob) - 1


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def clip_by_token(b: Batch, low: float, high: float, kl: float, dual: float | None = None) -> Rows:
    return [
        [
            ppo(exp(log_prob - b.engine[row][t]), b.advantage[row], low, high, dual) + kl * k3(log_prob, b.ref[row][t])
            for t, log_prob in enumerate(tokens)
        ]
        for row, tokens in enumerate(b.log_prob)
    ]


def token_mean(rows: Rows) -> float:
    return mean([value for row in rows for value in row])


def grpo(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.001))


def dapo(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.28, 0.0))


def dr_grpo(b: Batch) -> float:
    return sum(map(sum, clip_by_token(b, 0.2, 0.2, 0.0))) / (len(b.log_prob) * b.width)


def ppo_dual_clip(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.001, dual=3.0))


def gspo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.log_prob):
        if tokens:
            ratio = exp(mean([log_prob - old for log_prob, old in zip(tokens, b.engine[row], strict=True)]))
            losses.append(ppo(ratio, b.advantage[row], 3e-4, 4e-4))
    return mean(losses)


def cispo(b: Batch) -> float:
    return mean(
        [
            -min(max(exp(b.detached_log_prob[row][t] - b.engine[row][t]), 0.0), 5.0)
            * b.advantage[row]
            * b.log_prob[row][t]
            for row, t in b.tokens()
        ]
    )


def reinforce(b: Batch) -> float:
    return mean([-b.advantage[row] * b.log_prob[row][t] for row, t in b.tokens()])


def compat_megatron(b: Batch) -> float:
    return mean(
        [
            ppo(exp(b.log_prob[row][t] - b.trainer[row][t]), b.advantage[row], 0.01, 0.01)
            + 0.001 * k3(b.log_prob[row][t], b.ref[row][t])
            for row, t in b.tokens()
        ]
    )


def compat_coati_grpo(b: Batch) -> float:
    rows = clip_by_token(b, 0.2, 0.2, 0.01)
    return sum(sum(row) / (len(row) + 1e-8) for row in rows) / len(rows)


def compat_nanochat(b: Batch) -> float:
    passes = [range(start, min(start + 8, len(b.log_prob))) for start in range(0, len(b.log_prob), 8)]
    return mean(
        [mean([-b.advantage[row] * log_prob for row in rows for log_prob in b.log_prob[row]]) for rows in passes]
    )


def compat_trl(b: Batch) -> float:
    total = 0.0
    for row, tokens in enumerate(b.log_prob):
        weight = prod(exp(old - engine) for old, engine in zip(b.trainer[row], b.engine[row], strict=True))
        for t, log_prob in enumerate(tokens):
            total += (weight if weight <= 3 else 0.0) * ppo(
                exp(log_prob - b.trainer[row][t]), b.advantage[row], 0.2, 0.2
            )
    return total / len(b.tokens())


def compat_verl(b: Batch) -> float:
    return mean(
        [
            ppo(exp(b.log_prob[row][t] - b.trainer[row][t]), b.advantage[row], 0.2, 0.2, dual=3.0)
            + 0.001 * k3(b.log_prob[row][t], b.ref[row][t])
            for row, t in b.tokens()
        ]
    )


def compat_torchrl(b: Batch) -> float:
    kl = sum(k3(b.log_prob[row][t], b.engine[row][t]) for row, t in b.tokens()) / (len(b.log_prob) * b.width)
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.0)) + 0.01 * kl


def dppo(b: Batch) -> float:
    """Computes -A r, masked if a probability moved by over 0.2 in A's direction."""
    total = 0.0
    for row, t in b.tokens():
        moved = exp(b.detached_log_prob[row][t]) - exp(b.engine[row][t])
        kept = moved <= 0.2 if b.advantage[row] > 0 else moved >= -0.2
        total -= kept * b.advantage[row] * exp(b.log_prob[row][t] - b.engine[row][t])
    return total / len(b.tokens())


def binary_kl(q: float, p: float, smallest: float = 0.0) -> float:
    return q * log(q / p) + (1 - q) * log((1 - q + smallest) / (1 - p + smallest))


def dppo_kl(b: Batch) -> float:
    total = 0.0
    for row, t in b.tokens():
        p, q = exp(b.detached_log_prob[row][t]), exp(b.engine[row][t])
        far = binary_kl(q, p, 1e-8) > 0.05
        away = p > q if b.advantage[row] > 0 else p < q
        total -= (not (far and away)) * b.advantage[row] * exp(b.log_prob[row][t] - b.engine[row][t])
    return total / len(b.tokens())


def mismatch_weighted(b: Batch, weight: Callable[[float, float], float]) -> float:
    """Computes the clipped term by the trainer's ratio, times a mismatch weight.

    weight: function of the trainer's and the engine's log-prob.
    """
    terms = []
    for row, t in b.tokens():
        old = b.trainer[row][t]
        term = ppo(exp(b.log_prob[row][t] - old), b.advantage[row], 0.2, 0.2)
        terms.append(weight(old, b.engine[row][t]) * term)
    return mean(terms)


def icepop(b: Batch) -> float:
    def weight(old: float, engine: float) -> float:
        return exp(old - engine) if 0.5 <= exp(old - engine) <= 5.0 else 0.0

    return mismatch_weighted(b, weight)


def kpop(b: Batch) -> float:
    def weight(old: float, engine: float) -> float:
        p, q = (min(max(exp(each), 1e-8), 1 - 1e-8) for each in (old, engine))
        return exp(old - engine) if max(binary_kl(q, p), binary_kl(p, q)) <= 0.1 else 0.0

    return mismatch_weighted(b, weight)


def opsm(b: Batch) -> float:
    rows = clip_by_token(b, 0.2, 0.2, 0.0)
    for row, tokens in enumerate(b.detached_log_prob):
        drift = mean([old - log_prob for old, log_prob in zip(b.engine[row], tokens, strict=True)])
        if b.advantage[row] < 0 and drift > 0.1:
            rows[row] = [0.0] * len(tokens)
    return token_mean(rows)


def maxrl(b: Batch) -> float:
    return mean([-b.advantage[row] * exp(b.log_prob[row][t] - b.engine[row][t]) for row, t in b.tokens()])


def clip_only(b: Batch) -> float:
    return token_mean(clip_by_token(b, 0.2, 0.2, 0.0))


def sapo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.log_prob):
        advantage = b.advantage[row]
        tau = 1.0 if advantage > 0 else 1.05
        gates = [
            4 / tau / (1 + exp(-tau * (exp(log_prob - old) - 1)))
            for log_prob, old in zip(tokens, b.engine[row], strict=True)
        ]
        losses += [-advantage * mean(gates)] if tokens else []
    return mean(losses)


def gmpo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.log_prob):
        sign = 1 if b.advantage[row] > 0 else -1
        logs = [log_prob - old for log_prob, old in zip(tokens, b.engine[row], strict=True)]
        clipped_logs = [sign * min(sign * each, sign * min(max(each, -0.4), 0.4)) for each in logs]
        losses.append(-exp(mean(clipped_logs)) * b.advantage[row] if tokens else 0.0)
    return mean(losses)


def luspo(b: Batch) -> float:
    losses = []
    for row, tokens in enumerate(b.log_prob):
        ratio = exp(mean([log_prob - old for log_prob, old in zip(tokens, b.engine[row], strict=True)]))
        losses.append(len(tokens) * ppo(ratio, b.advantage[row], 2e-3, 2.5e-3))
    return mean(losses)


def vespo(b: Batch) -> float:
    total = 0.0
    for row, tokens in enumerate(b.detached_log_prob):
        log_w = sum(log_prob - old for log_prob, old in zip(tokens, b.engine[row], strict=True))
        power, slope = (2, 3) if b.advantage[row] >= 0 else (3, 2)
        phi = exp(slope + power * log_w - slope * exp(log_w))
        total -= phi * b.advantage[row] * sum(b.log_prob[row])
    return total / len(b.tokens())


def covariances(b: Batch) -> dict[tuple[int, int], float]:
    positions = b.tokens()
    middle = (
        mean([b.advantage[row] for row, _ in positions]),
        mean([b.detached_log_prob[row][t] for row, t in positions]),
    )
    return {
        (row, t): (b.advantage[row] - middle[0]) * (b.detached_log_prob[row][t] - middle[1]) for row, t in positions
    }


def clip_cov(b: Batch) -> float:
    """Drops one candidate token (of fewer than 10,000), if there are any."""
    rows = clip_by_token(b, 0.2, 0.2, 0.0)
    candidates = []
    for (row, t), covariance in covariances(b).items():
        ratio, advantage = exp(b.detached_log_prob[row][t] - b.engine[row][t]), b.advantage[row]
        binds = (ratio < 0.8 and advantage < 0) or (ratio > 1.2 and advantage > 0)
        candidates += [(row, t)] if 1.0 < covariance < 5.0 and not binds else []
    for row, t in shuffle_candidates(candidates)[:1]:
        rows[row][t] = 0.0
    return token_mean(rows)


def shuffle_candidates(candidates: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Shuffles candidates with the fixed seed of the loss."""
    generator = torch.Generator().manual_seed(len(candidates))
    return [candidates[index] for index in torch.randperm(len(candidates), generator=generator).tolist()]


def kl_cov(b: Batch) -> float:
    """Penalises one token (of fewer than 10,000), that with the highest covariance."""
    by_position = covariances(b)
    first = torch.tensor(list(by_position.values()), dtype=torch.float64).topk(1).indices
    highest = list(by_position)[int(first)]
    total = 0.0
    for row, t in b.tokens():
        moved = b.log_prob[row][t] - b.engine[row][t]
        total -= b.advantage[row] * exp(moved)
        total += abs(moved) if (row, t) == highest else 0.0
    return total / len(b.tokens())


def high_entropy(b: Batch) -> float:
    values = sorted(value for row in b.entropy for value in row)
    index = 0.8 * (len(values) - 1)
    below = int(index)
    above = min(below + 1, len(values) - 1)
    threshold = values[below] + (index - below) * (values[above] - values[below])
    rows = clip_by_token(b, 0.2, 0.28, 0.0)
    return mean([rows[row][t] if b.entropy[row][t] >= threshold else 0.0 for row, t in b.tokens()])


def unbiased_kl(b: Batch) -> float:
    rows = clip_by_token(b, 0.2, 0.2, 0.0)
    return mean(
        [
            rows[row][t] + 0.001 * k3(b.log_prob[row][t], b.ref[row][t]) * exp(b.log_prob[row][t] - b.engine[row][t])
            for row, t in b.tokens()
        ]
    )


def opd(b: Batch) -> float:
    """Uses the teacher's log-prob less the detached policy's as the advantage of each token."""
    return mean(
        [
            ppo(exp(b.log_prob[row][t] - b.engine[row][t]), b.ref[row][t] - b.detached_log_prob[row][t], 0.2, 0.2)
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
    "gdpo": clip_only,
    "pass_at_k": clip_only,
    "reinforce_pp": clip_only,
    "reinforce_pp_baseline": clip_only,
    "adaptive_entropy": clip_only,
    "echo": clip_only,
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
    """Computes central differences for each element of `log_prob`, with a fixed `detached_log_prob`."""
    slopes = [[0.0] * len(row) for row in batch.log_prob]
    start = [list(row) for row in batch.log_prob]
    batch.detached_log_prob = start
    for row, t in batch.tokens():
        around = []
        for shift in (step, -step):
            batch.log_prob = [list(values) for values in start]
            batch.log_prob[row][t] += shift
            around.append(loss(batch))
        slopes[row][t] = (around[0] - around[1]) / (2 * step)
        batch.log_prob = start
    return slopes
