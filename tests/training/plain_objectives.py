"""The presets' losses once more, in plain Python floats, each written out from its paper or its system.

Nothing is shared with training/loss.py. `fixed` holds the log-probs that a stop-gradient sees, so that finite
differences of `now` alone give the gradient.
"""

from collections.abc import Callable
from math import exp, prod

Rows = list[list[float]]


class Batch:
    """Rows of unequal length, without padding: log-probs by token, one advantage a row."""

    def __init__(self, now: Rows, engine: Rows, trainer: Rows, ref: Rows, advantage: list[float], width: int):
        self.now, self.fixed, self.engine, self.trainer, self.ref = now, now, engine, trainer, ref
        self.advantage, self.width = advantage, width

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
