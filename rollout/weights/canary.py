"""Have the engines got the learner's weights? What they draw with them shows it, for nothing.

    push ─▶ draw ─▶ the learner's forward pass on what was drawn: the same log-probs, as ever? ─yes─▶ proven ─▶ update
      │      │                                                       │no, or too few tokens
      │      └ all drawn before: engines score rows of it meanwhile ─┤
      └─ the first, and as often as their cost is no matter ─▶ fixed sequences ─▶ proven, or an error with its cause

So no update is made from weights that are not proven. A batch of overlapped generation may hold no token of the newest
weights: then engines score rows that earlier weights drew, beside the learner's own pass, which says what these rows
should have now; for that the learner does nothing. Fixed sequences are scored by every engine and by the learner;
their last token through the engine's prefix cache, which shows one that outlives a push. A sequence must be longer than
one cache block for that (128 tokens on a CPU, 16 on a GPU). Where what was drawn is out of its bounds, rows that
engines drew, or were asked about, before the push and for which the old numbers are known are scored as well. What goes
beyond the tolerance then is measured against what rounding does by the weights of now, before it is an error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from config.errors import RunError
from rollout.weights.canary_cause import cause
from rollout.weights.evidence import (
    Answer,
    Difference,
    Drawn,
    DrawnRow,
    Evidence,
    Scores,
    Tolerance,
    drawn_part,
    evidence_of,
    flat,
)
from rollout.weights.fixed_sequences import FixedSequences
from rollout.weights.rounding import Rounding

_FEWEST = 64  # tokens of an engine that prove it
_UNUSUAL = 2.0  # times the gap that what it drew had when fixed sequences last proved it
_LEAST_MEAN = 1e-6


class CanaryError(RunError):
    """The weights in an engine are not the learner's; the text names the cause that fits."""


@dataclass
class _Budget:
    """Seconds of the canary: all that it has spent since fixed sequences were scored first, and their last time."""

    share: float
    clock: Callable[[], float]
    began: float | None = None
    spent: float = 0.0
    last: float = 0.0

    def took(self, seconds: float) -> None:
        """By fixed sequences."""
        self.last = seconds
        if self.began is None:
            self.began = self.clock()
        else:
            self.spent += seconds

    def looked(self, seconds: float) -> None:
        """At what was drawn, or answered."""
        self.spent += seconds

    @property
    def allows(self) -> bool:
        return self.began is None or self.spent + self.last <= self.share * (self.clock() - self.began)


@dataclass
class Canary:
    """Proves every push, before the next update is made.

    fixed: the sequences of last resort.
    rounding: explains small differences. It is measured before the first comparison, when the learner has its weights,
        and closely, by the weights of then, where a difference goes beyond that.
    tied_head: the head's name where the embeddings are tied, else None.
    scores_anew: whether an engine scores again before a push that fixed sequences will prove, as they proved the one
        before. Where it keeps keys and values between requests, that fills its cache with those of the old weights, so
        that one which outlives the push shows. An engine without such a cache, or one that slept since the last push,
        need not, or cannot.
    share: of the time since the first push that the canary may have taken where fixed sequences are scored though
        nothing asks for them; None: they prove every push at once.
    clock: seconds of which that is the share; it may leave out those in which the run has to wait for others.
    """

    fixed: FixedSequences
    rounding: Rounding
    tied_head: str | None
    scores_anew: bool = True
    share: float | None = None
    clock: Callable[[], float] = time.perf_counter
    _pushed: int = -1
    _proven: int = -1
    _members: tuple[int, ...] = ()
    _lacks_tokens: bool = False
    _doubted: bool = False
    _drawn: Mapping[str, Drawn] = field(default_factory=dict)
    _heard: dict[str, Difference] = field(default_factory=dict)
    _rows_before: Mapping[str, Sequence[DrawnRow]] = field(default_factory=dict)
    _answered: Mapping[str, Sequence[DrawnRow]] = field(default_factory=dict)
    _usual: dict[str, Difference] = field(default_factory=dict)

    @cached_property
    def tolerance(self) -> Tolerance:
        """It widens where the weights of a later version round more."""
        return self.rounding.tolerance(self.fixed.token_ids)

    @cached_property
    def _budget(self) -> _Budget:
        return _Budget(0.0 if self.share is None else self.share, self.clock)

    @property
    def proven(self) -> bool:
        """Whether the last push has been."""
        return self._proven == self._pushed

    @property
    def _due(self) -> bool:
        """Whether fixed sequences are to prove the next push: also if what was drawn could not prove the last."""
        return self.share is None or self._lacks_tokens or self._budget.allows

    def before_push(self) -> None:
        """Score with the old weights, or let the scores after the last push stand.

        Raises:
            CanaryError: an engine that was replaced since the last push has other weights than the rest.
        """
        proven_so = self.fixed.names and self.fixed.version == self._pushed
        if not (self.scores_anew and proven_so and self._due):
            return
        began = self.clock()
        for name, difference in self.fixed.score_again().items():
            if not difference <= self.tolerance.largest:  # NaN is not
                raise CanaryError(
                    f"the canary before a push: {name} differs from policy version {self.fixed.version}, the last that "
                    f"was pushed, by up to {difference:.4g} in log-prob (tolerance {self.tolerance.largest:.4g}). "
                    "Cause: it replaced a lost engine since then and did not load that version"
                )
        self._budget.took(self.clock() - began)

    def after_push(self, version: int) -> dict[str, float]:
        """Where fixed sequences are due, what `prove` returns and raises."""
        due, self._pushed = self._due, version
        self._rows_before = {**self._answered, **{name: one.rows for name, one in self._drawn.items()}}
        self._drawn, self._answered, self._heard = {}, {}, {}
        return self.prove() if due else {}

    @property
    def enough(self) -> int:
        """Tokens drawn before a push that prove it where every engine scores them: as many as fixed sequences have."""
        return min(_FEWEST, sum(len(ids) - 1 for ids in self.fixed.token_ids))

    def lacks(self, drawn: Mapping[str, int]) -> bool:
        """Whether so many tokens, drawn with the weights of the last push, do not prove it; by the engine's name."""
        return not drawn or drawn.keys() != self._same_engines or min(drawn.values()) < _FEWEST

    @property
    def _same_engines(self) -> frozenset[str]:
        """Names of those that were proven last; none where one was replaced since."""
        return self.fixed.names if self.fixed.engines.members == self._members else frozenset()

    def look_at(
        self, drawn: Mapping[str, Drawn], ask: Callable[[], Answer] | None = None
    ) -> dict[str, float]:
        """What each engine drew with the weights of the last push, by its name; the metric `canary/max_abs_diff`.

        Whether that proves the push, `proven` says.

        ask: what engines with those weights say of rows that those before them drew; None: there are too few such rows.
        """
        began = self.clock()
        found = self._look_at(drawn, ask)
        self._budget.looked(self.clock() - began)
        return found

    def _look_at(self, drawn: Mapping[str, Drawn], ask: Callable[[], Answer] | None) -> dict[str, float]:
        self._drawn, found = drawn, _gaps(drawn)
        lacks = self.lacks({name: len(one.gaps) for name, one in drawn.items()})
        self._lacks_tokens = lacks and ask is None
        if self.proven:  # by fixed sequences, so this is how far apart they are when all is well
            self._usual |= found
            return {}
        self._doubted = not all(self._as_ever(name, gap) for name, gap in found.items())
        gaps = list(found.values())
        if lacks and ask is not None and not self._doubted:
            gaps += self._hear(ask())
        if self._doubted or self._lacks_tokens:
            return {}
        self._proven = self._pushed
        return {"canary/max_abs_diff": max(gap.largest for gap in gaps)}

    def _hear(self, answer: Answer) -> list[Difference]:
        """How far each engine is from the learner in what it was asked."""
        self._lacks_tokens = answer.scores.keys() != self._same_engines
        if self._lacks_tokens:
            return []
        self._answered = {name: answer.rows_of(name) for name in answer.scores}
        if answer.age == 1:
            self._rows_before = dict.fromkeys(answer.scores, answer.rows)
        found = {
            name: evidence_of(answer.rows, scores, answer.learner, self._noise(name), answer.age)
            for name, scores in answer.scores.items()
        }
        self._heard = {name: evidence.difference for name, evidence in found.items()}
        self._doubted = not all(self._sounds_well(name, evidence) for name, evidence in found.items())
        return list(self._heard.values())

    def _sounds_well(self, name: str, evidence: Evidence) -> bool:
        """More is asked of the last tokens: a prefix cache that outlived the push moves these few a part of the way."""
        usual = self._usual[name]
        last = evidence.where(evidence.last).difference.largest
        well = last <= _UNUSUAL * max(usual.largest, _LEAST_MEAN) and self._as_ever(name, evidence.difference)
        return well and evidence.agrees(self.tolerance)

    def _noise(self, name: str) -> float:
        return max(self._usual[name].most_rms, self.fixed.apart(name))

    def _as_ever(self, name: str, gap: Difference) -> bool:
        usual = self._usual.get(name)
        if usual is None:
            return gap.within(self.tolerance)
        largest = max(self.tolerance.largest, _UNUSUAL * usual.largest)
        return gap.within(Difference(largest, _UNUSUAL * max(usual.mean, _LEAST_MEAN)))

    def prove(self) -> dict[str, float]:
        """Compare by fixed sequences, and where they or what was drawn give reason to, by rows from before the push.

        Returns the metric `canary/max_abs_diff`.

        Raises:
            CanaryError: an engine disagrees, or did not move with the learner, or the learner's scores are not finite.
        """
        began = self.clock()
        found = self.fixed.evidence()
        if not all(evidence.learner.isfinite().all() for evidence in found.values()):
            raise CanaryError(
                f"the canary at the push of policy version {self._pushed}: the learner's own log-probs are not finite, "
                "whatever the engines have. Cause: training diverged, or a checkpoint that it went on from is damaged. "
                "Lower optimizer.lr, keep optimizer.clip_grad_norm, and go on from an earlier checkpoint with "
                "train.resume=PATH"
            )
        if not self._agree(found):
            errors = self._rounding_of(self.fixed.token_ids)
            found = {name: replace(evidence, rounding=flat(errors)) for name, evidence in found.items()}
        agree = self._agree(found)
        if self._doubted or not agree:
            self._compare_rows(self._rounding_of if agree else None)
        for name, evidence in found.items():
            self._check(name, evidence, self.fixed.learner_at)
        self.fixed.agreed(self._pushed)
        self._proven, self._doubted, self._members = self._pushed, False, self.fixed.engines.members
        first = {name: evidence.difference for name, evidence in found.items()}
        self._usual = first | self._usual | self._heard | _gaps(self._drawn)
        self._budget.took(self.clock() - began)
        return {"canary/max_abs_diff": max(evidence.difference.largest for evidence in found.values())}

    def _agree(self, found: Mapping[str, Evidence]) -> bool:
        return all(evidence.agrees(self.tolerance) for evidence in found.values())

    def _rounding_of(self, sequences: Sequence[Sequence[int]]) -> Scores:
        """What rounding does to their scores by the weights of now; the tolerance is no less than that explains."""
        errors = self.rounding.closely(sequences)
        self.tolerance = self.tolerance.or_wider(self.rounding.bound(errors))
        return errors

    def _compare_rows(self, rounding: Callable[[Sequence[Sequence[int]]], Scores] | None) -> None:
        """Every engine by what it drew before the push: whether it moved with the learner, if only a little.

        rounding: of sequences, where it may explain a difference; None: fixed sequences have shown that it does not.
        """
        for name, rows in self._rows_before.items():
            sequences = [row.sequence for row in rows]
            scored = self.fixed.engines.score(sequences) if rows else {}
            if name in scored:
                noise = None if all(row.learner for row in rows) else self._noise(name)
                evidence = evidence_of(rows, scored[name], self._learner_of(rows, 1.0), noise)
                if rounding is not None and not evidence.agrees(self.tolerance):
                    evidence = replace(evidence, rounding=drawn_part(rows, rounding(sequences)))
                self._check(name, evidence, partial(self._learner_of, rows))

    def _learner_of(self, rows: Sequence[DrawnRow], temperature: float) -> torch.Tensor:
        return drawn_part(rows, self.fixed.learner.score([row.sequence for row in rows], temperature))

    def _check(self, name: str, evidence: Evidence, learner_at: Callable[[float], torch.Tensor]) -> None:
        if evidence.agrees(self.tolerance):
            return
        engines = self.fixed.engines
        if self._members and engines.members != self._members:
            why = "Cause: it replaced a lost engine since the last proof and did not load what was pushed"
        else:
            why = cause(evidence, self.tolerance, learner_at, self.tied_head, engines.received)
        raise CanaryError(
            f"the canary after the push of policy version {self._pushed}: {name} differs from the learner "
            f"by up to {evidence.difference.largest:.4g} in log-prob (tolerance {self.tolerance.largest:.4g}, in "
            f"the mean {self.tolerance.mean:.4g}). {why}"
        )


def _gaps(drawn: Mapping[str, Drawn]) -> dict[str, Difference]:
    return {name: Difference.of(one.gaps) for name, one in drawn.items() if len(one.gaps)}
