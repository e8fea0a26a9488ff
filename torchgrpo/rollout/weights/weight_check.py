"""Compares log-probs of engines and learner after pushes, and raises `WeightMismatch` with a likely cause.

    push ─▶ fixed sequences, scored by every engine and by the learner      first push, new engine, every N pushes
            a few rows decoded by the engines, scored by the learner        first push
    step ─▶ tokens sampled since the push, scored by the learner            first step after a push

Every bound is absolute (`plan/log_prob_bounds.py`). A difference beyond its bound raises `WeightMismatch`, with the
most likely cause.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from config.schema.errors import RunError
from envs.group import Sampling
from torchgrpo.plan.plan import WeightCheckPlan
from torchgrpo.rollout.engines.interface import Engine, Request, generate
from torchgrpo.rollout.weights.weight_update import SequenceScorer

_DECODED_TOKENS, _COMPLETIONS_PER_PROMPT = 8, 4
"""Tokens of a completion decoded at the start, and completions of each prompt."""
_MIN_SAMPLED_TOKENS = 64
"""Sampled tokens of an engine that a comparison of their mean needs at least."""


class WeightMismatch(RunError):
    """An engine's log-probs differ from the learner's; the message names the most likely cause."""


@dataclass
class WeightCheck:
    """Compares log-probs of engines and learner, and stores those of the last comparison.

    check_interval: pushes between two comparisons. timeout_s: seconds that decoding may take without a finished row.
    version, engine_pids: policy version (None if none) and engines of the last comparison.
    """

    plan: WeightCheckPlan
    engines: Engine
    learner: SequenceScorer
    check_interval: int = 1
    timeout_s: float = 600.0
    version: int | None = None
    engine_pids: tuple[int, ...] = ()
    _engines_before: Mapping[str, Tensor] = field(default_factory=dict)
    _learner_before: Tensor | None = None

    def is_due(self, version: int) -> bool:
        """Whether fixed sequences must be compared after the push of this version."""
        new = self.version is None or self.engines.engine_pids != self.engine_pids
        return new or version - (self.version or 0) >= self.check_interval

    def compare(self, version: int) -> dict[str, float]:
        """Compares fixed sequences, and decoding at the first call; returns metrics of the differences.

        Raises:
            WeightMismatch: an engine is out of bounds. Its log-probs are stored for the next comparison all the same.
        """
        is_first, is_new_push = self.version is None, self.version != version
        engine_replaced = not is_first and self.engines.engine_pids != self.engine_pids
        before, engines_before = self._learner_before, self._engines_before
        sequences = random_sequences(self.learner.vocab_size, [self.plan.length] * self.plan.count)
        scored, learner = self.engines.score(sequences), _flatten(self.learner.score(sequences))
        engines = {name: _flatten(one.log_probs) for name, one in scored.items()}
        self.version, self.engine_pids = version, self.engines.engine_pids
        self._engines_before, self._learner_before = engines, learner
        subject = f"the push of policy version {version}"
        _check_divergence(subject, learner)
        has_moved = before is not None and float((learner - before).abs().max()) > self.plan.bounds.log_prob_change
        for name, engine in engines.items():
            if is_new_push and (stale := scored[name].cached_tokens):
                cause = f"prefix cache: {stale} tokens computed with the old weights are still cached"
            elif has_moved and name in engines_before and torch.equal(engine, engines_before[name]):
                cause = "old weights: the engine's log-probs are identical to those before the push"
            elif not self._is_within_bounds(engine, learner, self.plan.bounds.mean):
                cause = self._cause(sequences, engine, learner, is_first, engine_replaced)
            else:
                continue
            raise self._mismatch(subject, name, engine, learner, cause)
        if is_first:
            self.compare_decoding()
        gaps = torch.cat([log_prob_gap(engine, learner) for engine in engines.values()])
        return {"weight_check/mean": float(gaps.mean()), "weight_check/max": float(gaps.max())}

    def compare_decoding(self) -> None:
        """Compares log-probs of completions that engines decode. Raises WeightMismatch if out of bounds."""
        prompts = random_sequences(self.learner.vocab_size, self.plan.prompts)
        requests = [
            Request(
                (1 << 40) + index,
                tuple(prompt),
                _COMPLETIONS_PER_PROMPT,
                Sampling(max_tokens=_DECODED_TOKENS),
                seed=index,
            )
            for index, prompt in enumerate(prompts)
        ]
        responses = generate(self.engines, requests, self.timeout_s)
        answered = zip(requests, responses, strict=True)
        pairs = [(one.prompt, each) for one, response in answered for each in response.completions]
        scores = self.learner.score([[*prompt, *one.token_ids] for prompt, one in pairs])
        engine = _flatten([one.log_probs for _, one in pairs])
        learner = _flatten([row[-len(one.token_ids) :] for row, (_, one) in zip(scores, pairs, strict=True)])
        if not self._is_within_bounds(engine, learner, self.plan.bounds.sampled_mean):
            cause = (
                "wrong from the start: the engine's decoding is not this model's forward pass (its cache, "
                "positions or attention); set another inference_model.backend, or choose another model"
            )
            raise self._mismatch("completions decoded at the start", "the engine", engine, learner, cause)

    def needs_more_tokens(self, counts: Mapping[str, int]) -> bool:
        """Whether the number of sampled tokens of any engine is too small to compare.

        counts: sampled tokens, by engine name.
        """
        return any(counts.get(name, 0) < _MIN_SAMPLED_TOKENS for name in self._engines_before)

    def compare_sampled(self, version: int, engines: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Compares tokens of a batch that were sampled since the last push.

        engines: by engine name, log-probs of the engine and of the learner, [n] each. Metrics are in `mismatch/*`.

        Raises:
            WeightMismatch: the mean difference of an engine is out of bounds.
        """
        for name, (engine, learner) in engines.items():
            subject = f"{len(engine)} tokens sampled with policy version {version}"
            _check_divergence(subject, learner)
            if (
                len(engine) < _MIN_SAMPLED_TOKENS
                or log_prob_gap(engine, learner).mean() <= self.plan.bounds.sampled_mean
            ):
                continue
            cause = (
                "old weights, a cache that outlived the push, or other sampling settings; version "
                f"{self.version} was right"
            )
            if self.engines.engine_pids != self.engine_pids:
                cause = "old weights: the engine replaced a lost engine and lacks the last push"
            raise self._mismatch(subject, name, engine, learner, cause)

    def _mismatch(self, subject: str, name: str, engine: Tensor, learner: Tensor, cause: str) -> WeightMismatch:
        gaps, bounds = log_prob_gap(engine, learner), self.plan.bounds
        return WeightMismatch(
            f"weight check at {subject}: {name} differs from the learner by {float(gaps.mean()):.2g} in the mean and "
            f"{float(gaps.max()):.2g} at most, relative to 1 + |log-prob| (bounds for {self.plan.dtype}: "
            f"{bounds.mean:g} and {bounds.largest:g}, {bounds.sampled_mean:g} for sampled tokens). Cause: {cause}"
        )

    def _is_within_bounds(self, engine: Tensor, learner: Tensor, mean: float) -> bool:
        """Whether mean and largest gap of log-probs [n] are in bounds.

        False if any log-prob is not a number.
        """
        gaps = log_prob_gap(engine, learner)
        return bool(gaps.mean() <= mean and gaps.max() <= self.plan.bounds.largest)

    def _cause(
        self, sequences: Sequence[Sequence[int]], engine: Tensor, learner: Tensor, is_first: bool, engine_replaced: bool
    ) -> str:
        """Returns the known cause that fits best."""
        if not engine.isfinite().all():
            return "the engine's log-probs are not finite: tensors arrived damaged, or the engine's dtype overflows"
        if engine_replaced:
            return "old weights: an engine was replaced since the last check and lacks the last push"
        # Search for the temperature, from 0.2 to 5, at which the learner is nearest to the engine.
        low, high = math.log(0.2), math.log(5.0)
        for _ in range(3):
            grid = [low + (high - low) * step / 8 for step in range(9)]
            best = min(
                grid, key=lambda at: float((engine - _flatten(self.learner.score(sequences, math.exp(at)))).norm())
            )
            low, high = best - (high - low) / 8, best + (high - low) / 8
        temperature = math.exp(best)
        left = (engine - _flatten(self.learner.score(sequences, temperature))).norm()
        if left < 0.2 * (engine - learner).norm() and abs(math.log(temperature)) > 0.02:
            return f"another temperature: the engine samples at temperature {temperature:.2g}, not 1"
        if is_first:
            return "wrong from the start: set another inference_model.backend or dtype, or check the model's files"
        if float(log_prob_gap(engine, learner).mean()) < 2 * self.plan.bounds.mean:
            return "rounding: the difference is just beyond the bound; set inference_model.dtype=float32 to round less"
        return (
            "old weights in some tensors, or tensors that arrived cut, permuted or rounded (compare layout and dtype)"
        )


def _check_divergence(subject: str, learner: Tensor) -> None:
    if not learner.isfinite().all():
        raise WeightMismatch(
            f"weight check at {subject}: the learner's own log-probs are not finite. Cause: training "
            "diverged; lower optimizer.lr, and resume from an earlier checkpoint with train.resume=PATH"
        )


def log_prob_gap(engine: Tensor, learner: Tensor) -> Tensor:
    """Returns the absolute difference of log-probs [n], relative to 1 + |log-prob of the learner|."""
    return (engine - learner).abs() / (1 + learner.abs())


def random_sequences(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Returns sequences of random token ids from a fixed seed."""
    generator = torch.Generator().manual_seed(20_482)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _flatten(scores: Sequence[Sequence[float]]) -> Tensor:
    """Concatenates scores to a tensor float64 [n]."""
    return torch.tensor([score for row in scores for score in row], dtype=torch.float64)
