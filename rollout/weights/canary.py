"""After every push: do the engines and the learner give the same numbers, and did these move as they should?

A few fixed sequences are scored by every engine before and after the push, and by the learner after it. The
pass before also makes sure that the old weights' keys and values of these prefixes lie in the engine's prefix
cache: one that outlives the push shows at the last token of each sequence, which is scored through it. A
sequence must be longer than one cache block for that (128 tokens on a CPU, 16 on a GPU).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from config.errors import RunError
from rollout.engines.sampler import WeightTarget
from rollout.weights.outgoing import Learner

Scores = list[list[float]]

_LARGEST, _MEAN = 6.0, 4.0
"""Engines differ from the learner by 0.6 to 1.2 times the measured rounding, in the largest difference as in the mean
(a random model and one of 135 million parameters, bfloat16 and float16, on a CPU: the rest is for other kernels);
weights that arrived rounded to float8, the smallest known fault that rounding could hide, by ten times."""
_MEAN_SHARE = 1 / 6  # of the largest difference, where only that is given


@dataclass(frozen=True)
class Tolerance:
    """The |difference| in log-prob between engine and learner that rounding explains: the largest, and the mean."""

    largest: float
    mean: float

    @classmethod
    def within(cls, largest: float) -> "Tolerance":
        return cls(largest, largest * _MEAN_SHARE)

    @classmethod
    def measured(cls, dtype: str, errors: Scores) -> "Tolerance":
        """Some times what rounding was seen to do to this model, and at least what it does to any.

        errors: of each score, by the dtypes of learner and engine.
        """
        seen, floor = _flat(errors), cls.within(FLOOR[dtype])
        largest, mean = _LARGEST * float(seen.max()), _MEAN * float(seen.mean())
        return cls(max(floor.largest, largest), max(floor.mean, mean))


FLOOR = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 2e-2}
"""By the engine's dtype: the differences of a small model, whose few canary tokens may show too little of them."""

_DETECTABLE = 6.0  # a movement counts when it is this many times what noise would give
_NOISE_FLOOR = 1e-6


class CanaryError(RunError):
    """The weights in an engine are not the learner's; the text names the cause that fits."""


def canary_sequences(
    vocab_size: int, max_model_len: int, count: int = 3, length: int = 160
) -> list[list[int]]:
    """Fixed random token ids [count][length]; shorter where the engine's `max_model_len` is."""
    generator = torch.Generator().manual_seed(20_482)
    ids = torch.randint(0, vocab_size, (count, min(length, max_model_len)), generator=generator)
    return [row.tolist() for row in ids]


@dataclass(frozen=True)
class Evidence:
    """Log-probs of the same tokens, flat float64 vectors [n].

    engine, engine_before: after and before the push. learner, learner_before: of the new and the previous
    version; the earlier ones are None at the first push. last: true at each sequence's last token.
    """

    engine: torch.Tensor
    learner: torch.Tensor
    last: torch.Tensor
    engine_before: torch.Tensor | None = None
    learner_before: torch.Tensor | None = None

    def where(self, mask: torch.Tensor) -> "Evidence":
        return replace(self, **{name: one[mask] for name, one in vars(self).items() if one is not None})

    @property
    def max_abs_diff(self) -> float:
        return float((self.engine - self.learner).abs().max()) if len(self.engine) else 0.0

    @property
    def follows(self) -> bool:
        """Whether the engine moved with the learner, or noise may hide how: by its projection on the learner's movement
        where that is weak, by what the projection leaves where it is strong."""
        if self.engine_before is None or self.learner_before is None or not len(self.engine):
            return True
        engine, learner = self.engine - self.engine_before, self.learner - self.learner_before
        noise, movement = _rms(self.engine_before - self.learner_before), _rms(learner)
        if movement * math.sqrt(len(learner)) < _DETECTABLE * max(noise, _NOISE_FLOOR):
            return True
        if float(engine @ learner / (learner @ learner)) < 0.5:
            return False
        strong = movement > _DETECTABLE * noise and movement > _NOISE_FLOOR
        return not (strong and _rms(engine - learner) > 0.5 * movement)

    def agrees(self, tolerance: Tolerance) -> bool:
        """Near the learner everywhere, and moved with it: seen as a whole and through the prefix cache."""
        if not torch.isfinite(self.engine).all() or self.max_abs_diff > tolerance.largest:
            return False
        if len(self.engine) and float((self.engine - self.learner).abs().mean()) > tolerance.mean:
            return False
        return self.follows and self.where(self.last).follows


@dataclass
class Canary:
    """Scores the canary sequences around every push.

    sequences: token ids, each longer than a block of the engine's prefix cache. engines, learner: who scores them.
    measure_tolerance: called once, before the first comparison, when the learner has its weights.
    tied_head: the head's name where the embeddings are tied, else None.
    scores_anew: whether an engine scores again before each push. Where it keeps keys and values between requests, that
        fills its cache with those of the old weights, so that one which outlives the push shows. An engine without
        such a cache, or one that slept since the last push, need not, or cannot.
    """

    sequences: Sequence[Sequence[int]]
    engines: WeightTarget
    learner: Learner
    measure_tolerance: Callable[[], Tolerance]
    tied_head: str | None
    scores_anew: bool = True
    _before: Mapping[str, Scores] = field(default_factory=dict)
    _learner_before: torch.Tensor | None = None
    _version: int = -1

    @cached_property
    def tolerance(self) -> Tolerance:
        return self.measure_tolerance()

    def before_push(self) -> None:
        """Score with the old weights, or let the scores after the last push stand.

        Raises:
            CanaryError: an engine that was replaced since the last push has other weights than the rest.
        """
        if not self.scores_anew and self._before:
            return
        self._before = self.engines.score(self.sequences)
        if self._learner_before is None:
            return
        for name, scores in self._before.items():
            difference = float((_flat(scores) - self._learner_before).abs().max())
            if not difference <= self.tolerance.largest:  # NaN is not
                raise CanaryError(
                    f"the canary before a push: {name} differs from policy version {self._version}, the last that "
                    f"was pushed, by up to {difference:.4g} in log-prob (tolerance {self.tolerance.largest:.4g}). "
                    "Cause: it replaced a lost engine since then and did not load that version"
                )

    def after_push(self, version: int, received: frozenset[str]) -> dict[str, float]:
        """Compare; the metric `canary/max_abs_diff`.

        received: names that reached every engine with this push.
        Raises:
            CanaryError: an engine disagrees, or did not move with the learner, or the learner's scores are not finite.
        """
        learner = _flat(self.learner.score(self.sequences))
        if not torch.isfinite(learner).all():
            raise CanaryError(
                f"the canary at the push of policy version {version}: the learner's own log-probs are not finite, "
                "whatever the engines have. Cause: training diverged, or a checkpoint that it went on from is damaged. "
                "Lower optimizer.lr, keep optimizer.clip_grad_norm, and go on from an earlier checkpoint with "
                "train.resume=PATH"
            )
        worst = 0.0
        last = torch.cat([torch.arange(len(s) - 1) == len(s) - 2 for s in self.sequences])
        after = self.engines.score(self.sequences)
        for name, scores in after.items():
            before = _flat(self._before[name]) if name in self._before else None
            evidence = Evidence(_flat(scores), learner, last, before, self._learner_before)
            if not evidence.agrees(self.tolerance):
                cause = self._cause(evidence, received)
                raise CanaryError(
                    f"the canary after the push of policy version {version}: {name} differs from the learner "
                    f"by up to {evidence.max_abs_diff:.4g} in log-prob (tolerance {self.tolerance.largest:.4g}, in "
                    f"the mean {self.tolerance.mean:.4g}). {cause}"
                )
            worst = max(worst, evidence.max_abs_diff)
        self._learner_before, self._before, self._version = learner, after, version
        return {"canary/max_abs_diff": worst}

    def _cause(self, evidence: Evidence, received: frozenset[str]) -> str:
        """The known cause that fits best. The order matters: the first ones leave a trace of their own."""
        if not torch.isfinite(evidence.engine).all():
            return "Cause: shard or dtype garbage; the engine's log-probs are not finite"
        if evidence.where(~evidence.last).agrees(self.tolerance):
            return (
                "Cause: stale prefix cache; only tokens scored through cached keys and values are off, which "
                "the old weights wrote (reset_prefix_cache did not run, or not on this engine)"
            )
        before = evidence.engine_before
        if before is not None and _rms(evidence.engine - before) < 0.1 * _rms(evidence.learner - before):
            return "Cause: unchanged; the engine still answers with its weights from before the push"
        if self.tied_head is not None and self.tied_head not in received:
            return (
                f"Cause: tied head missing; the push lacked {self.tied_head}, so the engine kept the "
                "old head beside the new embeddings (send the full state_dict)"
            )
        temperature = self._temperature(evidence)
        if temperature is not None:
            return f"Cause: temperature scaled; the engine answers as at temperature {temperature:.3g}, not 1"
        return (
            "Cause: shard or dtype garbage; some tensors arrived cut, permuted or rounded (compare the "
            "tensor-parallel layout and inference_model.dtype of both sides)"
        )

    def _temperature(self, evidence: Evidence) -> float | None:
        """The temperature at which the learner gives the engine's numbers, if there is one other than 1."""

        def distance(log_temperature: float) -> float:
            scores = _flat(self.learner.score(self.sequences, math.exp(log_temperature)))
            return _rms(evidence.engine - scores)

        low, high = math.log(0.2), math.log(5.0)
        for _ in range(24):  # ternary search: the distance falls towards the right temperature on both sides
            third = (high - low) / 3
            if distance(low + third) < distance(high - third):
                high -= third
            else:
                low += third
        best = (low + high) / 2
        explained = distance(best) < 0.1 * _rms(evidence.engine - evidence.learner)
        return math.exp(best) if explained and abs(best) > 0.01 else None


def _flat(scores: Scores) -> torch.Tensor:
    return torch.tensor([score for row in scores for score in row], dtype=torch.float64)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
