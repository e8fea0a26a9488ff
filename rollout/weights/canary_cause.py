"""Why an engine's log-probs are not the learner's: the known faults of a push, each by the trace that it leaves."""

import math
from collections.abc import Callable

import torch

from rollout.weights.evidence import Evidence, Tolerance, rms


def cause(
    evidence: Evidence,
    tolerance: Tolerance,
    learner_at: Callable[[float], torch.Tensor],
    tied_head: str | None,
    received: frozenset[str],
) -> str:
    """The known cause that fits best. The order matters: the first ones leave a trace of their own.

    learner_at: the learner's log-probs of the same tokens at a temperature. tied_head: the name of a head that shares
    its tensor with the embeddings, else None. received: names that reached every engine with the push.
    """
    if not torch.isfinite(evidence.engine).all():
        return "Cause: shard or dtype garbage; the engine's log-probs are not finite"
    if evidence.where(~evidence.last).agrees(tolerance):
        return (
            "Cause: stale prefix cache; only tokens scored through cached keys and values are off, which "
            "the old weights wrote (reset_prefix_cache did not run, or not on this engine)"
        )
    before = evidence.engine_before
    if before is not None and rms(evidence.engine - before) < 0.1 * rms(evidence.learner - before):
        return "Cause: unchanged; the engine still answers with its weights from before the push"
    if tied_head is not None and tied_head not in received:
        return (
            f"Cause: tied head missing; the push lacked {tied_head}, so the engine kept the "
            "old head beside the new embeddings (send the full state_dict)"
        )
    temperature = _temperature(evidence, learner_at)
    if temperature is not None:
        return f"Cause: temperature scaled; the engine answers as at temperature {temperature:.3g}, not 1"
    return (
        "Cause: shard or dtype garbage; some tensors arrived cut, permuted or rounded (compare the "
        "tensor-parallel layout and inference_model.dtype of both sides)"
    )


def _temperature(evidence: Evidence, learner_at: Callable[[float], torch.Tensor]) -> float | None:
    """The temperature at which the learner gives the engine's numbers, if there is one other than 1."""

    def square(inverse: float) -> float:
        return float((evidence.engine - learner_at(1.0 / inverse)).square().mean())

    # Log-probs are almost linear in the inverse, so their squared distance is almost a parabola in it.
    inverse, lowest = _lowest(square, 0.2, 5.0)
    explained = math.sqrt(lowest) < 0.1 * rms(evidence.engine - evidence.learner)
    return 1.0 / inverse if explained and abs(math.log(inverse)) > 0.01 else None


def _lowest(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Where a function that is almost a parabola is lowest, and its value: the lowest point of the parabola through
    three points takes the place of the highest of them, nine times at most."""
    points = [(at, function(at)) for at in (low, (low + high) / 2.0, high)]
    for _ in range(9):
        (a, at_a), (b, at_b), (c, at_c) = sorted(points)
        left, right = (b - a) * (at_b - at_c), (b - c) * (at_b - at_a)
        if left == right:
            break
        turn = b - 0.5 * ((b - a) * left - (b - c) * right) / (left - right)
        turn = min(max(turn, low), high)
        if any(abs(turn - at) < 1e-4 for at, _ in points):
            break
        points = [*sorted(points, key=lambda point: point[1])[:2], (turn, function(turn))]
    return min(points, key=lambda point: point[1])
