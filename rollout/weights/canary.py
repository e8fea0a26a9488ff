"""Have the engines got the learner's weights? What they draw with them shows it, for nothing.

    push ─▶ draw ─▶ the learner's forward pass on what was drawn ─▶ the same log-probs as ever? ─yes─▶ proven ─▶ update
      │                                                                    │no, or too few tokens
      └─ the first, and as often as their cost is no matter ─▶ fixed sequences ─▶ proven, or the cause

So no update is made from weights that are not proven. Fixed sequences are scored by every engine and by the learner;
their last token through the engine's prefix cache, which shows one that outlives a push. A sequence must be longer than
one cache block for that (128 tokens on a CPU, 16 on a GPU). Where what was drawn is out of its bounds, rows that the
same engine drew before the push, for which both sides' old numbers are known, are scored as well.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from config.errors import RunError
from rollout.engines.sampler import WeightTarget
from rollout.weights.cause import cause
from rollout.weights.evidence import (
    Drawn,
    DrawnRow,
    Evidence,
    Scores,
    Tolerance,
    drawn_part,
    evidence_of,
    flat,
)
from rollout.weights.outgoing import Learner

_FEWEST = 64  # tokens of an engine that prove it
_UNUSUAL = 2.0  # times the mean gap that what it drew had when fixed sequences last proved it
_LEAST_MEAN = 1e-6


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
class _Gap:
    """|log-prob of the engine less that of the learner| over tokens: the mean, and the largest."""

    mean: float
    largest: float

    @classmethod
    def of(cls, drawn: Drawn) -> "_Gap":
        gaps = drawn.gaps.double()
        return cls(float(gaps.mean()), float(gaps.max()))


@dataclass
class Canary:
    """Proves every push, before the next update is made.

    sequences: token ids, each longer than a block of the engine's prefix cache. engines, learner: who scores them.
    measure_tolerance: called once, before the first comparison, when the learner has its weights.
    tied_head: the head's name where the embeddings are tied, else None.
    scores_anew: whether an engine scores again before a push that fixed sequences will prove, as they proved the one
        before. Where it keeps keys and values between requests, that fills its cache with those of the old weights, so
        that one which outlives the push shows. An engine without such a cache, or one that slept since the last push,
        need not, or cannot.
    share: of the time since the first push that fixed sequences may take where nothing asks for them; None: they prove
        every push at once.
    """

    sequences: Sequence[Sequence[int]]
    engines: WeightTarget
    learner: Learner
    measure_tolerance: Callable[[], Tolerance]
    tied_head: str | None
    scores_anew: bool = True
    share: float | None = None
    _before: Mapping[str, Scores] = field(default_factory=dict)
    _learner_before: torch.Tensor | None = None
    _scored: int = -1  # the version that fixed sequences proved last
    _proven: int = -1
    _pushed: int = -1
    _members: tuple[int, ...] = ()
    _lacks_tokens: bool = False
    _doubted: bool = False
    _drawn: Mapping[str, Drawn] = field(default_factory=dict)
    _rows: Mapping[str, Sequence[DrawnRow]] = field(default_factory=dict)
    _usual: dict[str, _Gap] = field(default_factory=dict)
    _began: float = 0.0
    _spent: float = 0.0
    _cost: float = 0.0

    @cached_property
    def tolerance(self) -> Tolerance:
        return self.measure_tolerance()

    @property
    def proven(self) -> bool:
        """Whether the last push has been."""
        return self._proven == self._pushed

    def before_push(self) -> None:
        """Score with the old weights, or let the scores after the last push stand.

        Raises:
            CanaryError: an engine that was replaced since the last push has other weights than the rest.
        """
        if not (self.scores_anew and self._due and self._before and self._scored == self._pushed):
            return
        began = time.perf_counter()
        self._before = self.engines.score(self.sequences)
        self._spent += time.perf_counter() - began
        assert self._learner_before is not None
        for name, scores in self._before.items():
            difference = float((flat(scores) - self._learner_before).abs().max())
            if not difference <= self.tolerance.largest:  # NaN is not
                raise CanaryError(
                    f"the canary before a push: {name} differs from policy version {self._scored}, the last that "
                    f"was pushed, by up to {difference:.4g} in log-prob (tolerance {self.tolerance.largest:.4g}). "
                    "Cause: it replaced a lost engine since then and did not load that version"
                )

    def after_push(self, version: int) -> dict[str, float]:
        """Where fixed sequences are due, what `prove` returns and raises."""
        due, self._pushed = self._due, version
        self._rows = {name: one.rows for name, one in self._drawn.items()}
        self._drawn = {}
        return self.prove() if due else {}

    @property
    def _due(self) -> bool:
        """Whether fixed sequences prove the next push, or have to as what was drawn could not prove the last."""
        if self.share is None or not self._before or self._lacks_tokens:
            return True
        return self._spent + self._cost <= self.share * (time.perf_counter() - self._began)

    def look_at(self, drawn: Mapping[str, Drawn]) -> dict[str, float]:
        """What each engine drew with the weights of the last push, by its name; the metric `canary/max_abs_diff`.

        Whether that proves the push, `proven` says. Touches no engine.
        """
        self._lacks_tokens = drawn.keys() != self._before.keys() or self.engines.members != self._members
        self._lacks_tokens |= any(len(one.gaps) < _FEWEST for one in drawn.values())
        found, self._drawn = _gaps(drawn), drawn
        if self.proven:  # by fixed sequences, so this is how far apart they are when all is well
            self._usual |= found
            return {}
        self._doubted = not all(self._as_ever(name, gap) for name, gap in found.items())
        if self._doubted or self._lacks_tokens:
            return {}
        self._proven = self._pushed
        return {"canary/max_abs_diff": max(gap.largest for gap in found.values())}

    def _as_ever(self, name: str, gap: _Gap) -> bool:
        tolerance, usual = self.tolerance, self._usual.get(name)
        if usual is None:
            return gap.mean <= tolerance.mean and gap.largest <= tolerance.largest
        largest = max(tolerance.largest, _UNUSUAL * usual.largest)
        return gap.mean <= _UNUSUAL * max(usual.mean, _LEAST_MEAN) and gap.largest <= largest

    def prove(self) -> dict[str, float]:
        """Compare by fixed sequences, and where they or what was drawn give reason to, by rows from before the push.

        Returns the metric `canary/max_abs_diff`.

        Raises:
            CanaryError: an engine disagrees, or did not move with the learner, or the learner's scores are not finite.
        """
        began = time.perf_counter()
        learner, scored = self._learner_scores(), self.engines.score(self.sequences)
        last = torch.cat([torch.arange(len(s) - 1) == len(s) - 2 for s in self.sequences])
        found: dict[str, Evidence] = {}
        for name, scores in scored.items():
            before = flat(self._before[name]) if name in self._before else None
            found[name] = Evidence(flat(scores), learner, last, before, self._learner_before)
        agreed = all(evidence.agrees(self.tolerance) for evidence in found.values())
        if self._doubted or not agreed:
            self._compare_rows()
        for name, evidence in found.items():
            self._check(name, evidence, self._of_fixed)
        self._learner_before, self._before, self._members = learner, scored, self.engines.members
        self._scored = self._proven = self._pushed
        self._usual |= _gaps(self._drawn)
        self._doubted = False
        self._account(began)
        return {"canary/max_abs_diff": max(evidence.max_abs_diff for evidence in found.values())}

    def _learner_scores(self) -> torch.Tensor:
        learner = flat(self.learner.score(self.sequences))
        if not torch.isfinite(learner).all():
            raise CanaryError(
                f"the canary at the push of policy version {self._pushed}: the learner's own log-probs are not finite, "
                "whatever the engines have. Cause: training diverged, or a checkpoint that it went on from is damaged. "
                "Lower optimizer.lr, keep optimizer.clip_grad_norm, and go on from an earlier checkpoint with "
                "train.resume=PATH"
            )
        return learner

    def _compare_rows(self) -> None:
        """Every engine by what it drew before the push: whether it moved with the learner, if only a little."""
        for name, rows in self._rows.items():
            scored = self.engines.score([row.sequence for row in rows]) if rows else {}
            if name in scored:
                evidence = evidence_of(rows, scored[name], self._of_rows(rows, 1.0))
                self._check(name, evidence, partial(self._of_rows, rows))

    def _of_rows(self, rows: Sequence[DrawnRow], temperature: float) -> torch.Tensor:
        return drawn_part(rows, self.learner.score([row.sequence for row in rows], temperature))

    def _of_fixed(self, temperature: float) -> torch.Tensor:
        return flat(self.learner.score(self.sequences, temperature))

    def _check(self, name: str, evidence: Evidence, learner_at: Callable[[float], torch.Tensor]) -> None:
        if evidence.agrees(self.tolerance):
            return
        if self._members and self.engines.members != self._members:
            why = "Cause: it replaced a lost engine since the last proof and did not load what was pushed"
        else:
            why = cause(evidence, self.tolerance, learner_at, self.tied_head, self.engines.received)
        raise CanaryError(
            f"the canary after the push of policy version {self._pushed}: {name} differs from the learner "
            f"by up to {evidence.max_abs_diff:.4g} in log-prob (tolerance {self.tolerance.largest:.4g}, in "
            f"the mean {self.tolerance.mean:.4g}). {why}"
        )

    def _account(self, began: float) -> None:
        """The first comparison is nobody's choice; time counts from its end."""
        now = time.perf_counter()
        self._cost = now - began
        if self._began:
            self._spent += self._cost
        else:
            self._began = now


def _gaps(drawn: Mapping[str, Drawn]) -> dict[str, _Gap]:
    return {name: _Gap.of(one) for name, one in drawn.items() if len(one.gaps)}
