"""Whether the engines have the learner's weights and compute with them as the learner does.

    push ─▶ fixed sequences, scored by every engine and by the learner      first push, new engine, every N pushes
            a few rows decoded by the engines, scored by the learner        first push
    step ─▶ tokens that the engines sampled since, scored by the learner    first step after a push

Every bound is absolute (`plan/weight_bounds.py`). Beyond it is a `WeightMismatch`, with the cause that fits.
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
from torchgrpo.rollout.weights.outgoing import Scorer

_DECODED, _COMPLETIONS = 8, 4
"""Tokens of a completion that is decoded at the start, and completions of each prompt."""
_FEWEST = 64
"""Sampled tokens of an engine from which on their mean says something."""


class WeightMismatch(RunError):
    """An engine does not compute the learner's log-probs; the text names the cause that fits."""


@dataclass
class WeightCheck:
    """Compares engines and learner, and keeps what both said last.

    every: pushes between two comparisons. timeout_s: that engines may decode without finishing any row.
    version: of the last comparison, None before it. members: the engines then.
    """

    plan: WeightCheckPlan
    engines: Engine
    learner: Scorer
    every: int = 1
    timeout_s: float = 600.0
    version: int | None = None
    members: tuple[int, ...] = ()
    _engines_before: Mapping[str, Tensor] = field(default_factory=dict)
    _learner_before: Tensor | None = None

    def due(self, version: int) -> bool:
        """Whether the push of this version is to be compared by fixed sequences."""
        new = self.version is None or self.engines.members != self.members
        return new or version - (self.version or 0) >= self.every

    def compare(self, version: int) -> dict[str, float]:
        """Compare fixed sequences, the first time also decoding; returns metrics of the differences.

        Raises:
            WeightMismatch: an engine is out of bounds. The next comparison is with what was found now.
        """
        first, pushed = self.version is None, self.version != version
        replaced = not first and self.engines.members != self.members
        before, engines_before = self._learner_before, self._engines_before
        sequences = random_sequences(self.learner.vocab_size, [self.plan.length] * self.plan.count)
        scored, learner = self.engines.score(sequences), _flat(self.learner.score(sequences))
        engines = {name: _flat(one.log_probs) for name, one in scored.items()}
        self.version, self.members = version, self.engines.members
        self._engines_before, self._learner_before = engines, learner
        what = f"the push of policy version {version}"
        _refuse_divergence(what, learner)
        moved = before is not None and float((learner - before).abs().max()) > self.plan.bounds.moved
        for name, engine in engines.items():
            if pushed and (stale := scored[name].cached_tokens):
                cause = f"prefix cache: {stale} tokens that the old weights computed are still in it"
            elif moved and name in engines_before and torch.equal(engine, engines_before[name]):
                cause = "old weights: the engine answers with the very log-probs of before the push"
            elif not self._within(engine, learner, self.plan.bounds.mean):
                cause = self._cause(sequences, engine, learner, first, replaced)
            else:
                continue
            raise self._mismatch(what, name, engine, learner, cause)
        if first:
            self.compare_decoding()
        gaps = torch.cat([gap(engine, learner) for engine in engines.values()])
        return {"weight_check/mean": float(gaps.mean()), "weight_check/largest": float(gaps.max())}

    def compare_decoding(self) -> None:
        """Decode a few rows, and score them. Raises WeightMismatch where both differ."""
        prompts = random_sequences(self.learner.vocab_size, self.plan.prompts)
        requests = [
            Request((1 << 40) + place, tuple(prompt), _COMPLETIONS, Sampling(max_tokens=_DECODED), seed=place)
            for place, prompt in enumerate(prompts)
        ]
        responses = generate(self.engines, requests, self.timeout_s)
        found = zip(requests, responses, strict=True)
        pairs = [(one.prompt, each) for one, response in found for each in response.completions]
        scores = self.learner.score([[*prompt, *one.token_ids] for prompt, one in pairs])
        engine = _flat([one.log_probs for _, one in pairs])
        learner = _flat([row[-len(one.token_ids) :] for row, (_, one) in zip(scores, pairs, strict=True)])
        if not self._within(engine, learner, self.plan.bounds.sampled):
            cause = (
                "wrong from the start: the engine's decoding is not this model's forward pass (its cache, positions or "
                "attention); take another inference_model.backend, or another model"
            )
            raise self._mismatch("what was decoded at the start", "the engine", engine, learner, cause)

    def lacks(self, counts: Mapping[str, int]) -> bool:
        """Whether so many sampled tokens, by the engine's name, say too little of some engine."""
        return any(counts.get(name, 0) < _FEWEST for name in self._engines_before)

    def compare_sampled(self, version: int, engines: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Compare tokens of a batch that were sampled since the last push.

        engines: by the engine's name, its log-probs and the learner's, [n] each. `mismatch/*` has the metrics.

        Raises:
            WeightMismatch: the mean difference of an engine is out of bounds.
        """
        for name, (engine, learner) in engines.items():
            what = f"{len(engine)} tokens sampled with policy version {version}"
            _refuse_divergence(what, learner)
            if len(engine) < _FEWEST or gap(engine, learner).mean() <= self.plan.bounds.sampled:
                continue
            cause = f"old weights, a cache that outlived the push, or other sampling; version {self.version} was right"
            if self.engines.members != self.members:
                cause = "old weights: it replaced a lost engine and lacks what was pushed"
            raise self._mismatch(what, name, engine, learner, cause)

    def _mismatch(self, what: str, name: str, engine: Tensor, learner: Tensor, cause: str) -> WeightMismatch:
        gaps, bounds = gap(engine, learner), self.plan.bounds
        return WeightMismatch(
            f"weight check at {what}: {name} differs from the learner by {float(gaps.mean()):.2g} in the mean and "
            f"{float(gaps.max()):.2g} at most, relative to 1 + |log-prob| (bounds for {self.plan.dtype}: "
            f"{bounds.mean:g} and {bounds.largest:g}, {bounds.sampled:g} for sampled tokens). Cause: {cause}"
        )

    def _within(self, engine: Tensor, learner: Tensor, mean: float) -> bool:
        """False where one of the log-probs [n] is not a number."""
        gaps = gap(engine, learner)
        return bool(gaps.mean() <= mean and gaps.max() <= self.plan.bounds.largest)

    def _cause(
        self, sequences: Sequence[Sequence[int]], engine: Tensor, learner: Tensor, first: bool, replaced: bool
    ) -> str:
        """The known cause that fits best."""
        if not engine.isfinite().all():
            return "the engine's log-probs are not finite: tensors arrived damaged, or its dtype overflows"
        if replaced:
            return "old weights: an engine was replaced since the last check and lacks what was pushed"
        # The temperature, from 0.2 to 5, at which the learner is nearest to the engine.
        low, high = math.log(0.2), math.log(5.0)
        for _ in range(3):
            grid = [low + (high - low) * step / 8 for step in range(9)]
            best = min(
                grid,
                key=lambda at: float((engine - _flat(self.learner.score(sequences, math.exp(at)))).norm()),
            )
            low, high = best - (high - low) / 8, best + (high - low) / 8
        temperature = math.exp(best)
        left = (engine - _flat(self.learner.score(sequences, temperature))).norm()
        if left < 0.2 * (engine - learner).norm() and abs(math.log(temperature)) > 0.02:
            return f"another temperature: the engine answers as at temperature {temperature:.2g}, not 1"
        if first:
            return "wrong from the start: take another inference_model.backend or dtype, or look at the model's files"
        if float(gap(engine, learner).mean()) < 2 * self.plan.bounds.mean:
            return "rounding: just beyond the bound; inference_model.dtype=float32 rounds less"
        return "old weights in a part, or tensors that arrived cut, permuted or rounded (compare layout and dtype)"


def _refuse_divergence(what: str, learner: Tensor) -> None:
    if not learner.isfinite().all():
        raise WeightMismatch(
            f"weight check at {what}: the learner's own log-probs are not finite. Cause: training diverged; lower "
            "optimizer.lr, and go on from an earlier checkpoint with train.resume=PATH"
        )


def gap(engine: Tensor, learner: Tensor) -> Tensor:
    """|difference| of log-probs [n], relative to 1 + |the learner's|."""
    return (engine - learner).abs() / (1 + learner.abs())


def random_sequences(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids, the same each time."""
    generator = torch.Generator().manual_seed(20_482)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _flat(scores: Sequence[Sequence[float]]) -> Tensor:
    """float64 [n]."""
    return torch.tensor([score for row in scores for score in row], dtype=torch.float64)
