"""Log-probs that an engine and the learner give the same tokens: are they the same weights', but for rounding?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Scores = list[list[float]]

_LARGEST, _MEAN = 6.0, 4.0
"""Engines differ from the learner by 0.6 to 1.2 times the measured rounding, in the largest difference as in the mean
(a random model and one of 135 million parameters, bfloat16 and float16, on a CPU: the rest is for other kernels);
weights that arrived rounded to float8, the smallest known fault that rounding could hide, by ten times."""
_MEAN_SHARE = 1 / 6  # of the largest difference, where only that is given


@dataclass(frozen=True)
class Difference:
    """|log-prob of the engine less that of the learner| over tokens: the largest, and the mean."""

    largest: float
    mean: float

    @classmethod
    def of(cls, gaps: torch.Tensor) -> "Difference":
        """gaps: of each token, [n], whatever their sign; of none it is nothing."""
        sizes = gaps.double().abs() if len(gaps) else torch.zeros(1, dtype=torch.float64)
        return cls(float(sizes.max()), float(sizes.mean()))

    @property
    def most_rms(self) -> float:
        """The root of the mean square is no larger, for no square is more than the largest times its own root."""
        return math.sqrt(self.largest * self.mean)

    def within(self, bound: "Difference") -> bool:
        """False where one is not a number."""
        return self.largest <= bound.largest and self.mean <= bound.mean


class Tolerance(Difference):
    """What rounding explains."""

    @classmethod
    def up_to(cls, largest: float) -> "Tolerance":
        return cls(largest, largest * _MEAN_SHARE)

    @classmethod
    def measured(cls, arithmetic: str, errors: Scores) -> "Tolerance":
        """Some times what rounding was seen to do to this model, and at least what it does to any.

        arithmetic: the engine's. errors: of each score, by the learner's arithmetic and that.
        """
        seen, floor = flat(errors), cls.up_to(FLOOR[arithmetic])
        largest, mean = _LARGEST * float(seen.max()), _MEAN * float(seen.mean())
        return cls(max(floor.largest, largest), max(floor.mean, mean))

    def or_wider(self, other: "Tolerance") -> "Tolerance":
        return Tolerance(max(self.largest, other.largest), max(self.mean, other.mean))


FLOOR = {"float32": 1e-3, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 2e-2}
"""By the engine's arithmetic: the differences of a small model, whose few canary tokens may show too little of them."""

_DETECTABLE = 6.0  # a movement counts when it is this many times what noise would give
_NOISE_FLOOR = 1e-6
_LEAST_OF_DRAWN = 2.0
"""What a merged adapter loses by rounding is missing in an engine's numbers and not in those of the learner's training
pass: noise that is the same in many tokens."""


@dataclass(frozen=True)
class Evidence:
    """Log-probs of the same tokens, flat float64 vectors [n].

    engine, engine_before: after and before the push. learner, learner_before: of the new and the previous
    version; the earlier ones are None at the first push. last: true at each sequence's last token. least: times the
    noise that the learner's movement must have to be told from it, however many tokens show it. noise: of the engine's
    numbers, the root of its mean square; None: as far as both sides were apart before. rounding: what it may do to each
    number now, which the noise is no less than; None: not measured. age: pushes since before.
    """

    engine: torch.Tensor
    learner: torch.Tensor
    last: torch.Tensor
    engine_before: torch.Tensor | None = None
    learner_before: torch.Tensor | None = None
    least: float = 0.0
    noise: float | None = None
    rounding: torch.Tensor | None = None
    age: int = 1

    def where(self, mask: torch.Tensor) -> "Evidence":
        part: dict[str, Any] = {
            name: one[mask] for name, one in vars(self).items() if isinstance(one, torch.Tensor)
        }
        return replace(self, **part)

    @property
    def difference(self) -> Difference:
        return Difference.of(self.engine - self.learner)

    @property
    def follows(self) -> bool:
        """Whether the engine moved with the learner, or noise may hide how: by its projection on the learner's movement
        where that is weak, by what the projection leaves where it is strong. Of more than one push none may be missing,
        so the bounds are as many times as close."""
        if self.engine_before is None or self.learner_before is None or not len(self.engine):
            return True
        engine, learner = self.engine - self.engine_before, self.learner - self.learner_before
        apart = rms(self.engine_before - self.learner_before)
        noise, movement = apart if self.noise is None else self.noise, rms(learner)
        if self.rounding is not None:
            noise = max(noise, rms(self.rounding))
        detectable = max(_DETECTABLE / math.sqrt(len(learner)), self.least) * self.age
        missing = 0.5 / self.age
        if movement < detectable * max(noise, _NOISE_FLOOR):
            return True
        if float(engine @ learner / (learner @ learner)) < 1 - missing:
            return False
        strong = movement > _DETECTABLE * self.age * noise and movement > _NOISE_FLOOR
        return not (strong and rms(engine - learner) > missing * movement)

    def agrees(self, tolerance: Tolerance) -> bool:
        """Near the learner everywhere, and moved with it: seen as a whole and through the prefix cache."""
        return self.difference.within(tolerance) and self.follows and self.where(self.last).follows


@dataclass(frozen=True)
class DrawnRow:
    """A prompt and what an engine drew behind it, from the whole distribution at temperature 1.

    engine, learner: log-probs of the drawn tokens, in their order, by the weights before a push; the learner's are None
    where it has never said them.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    engine: Sequence[float]
    learner: Sequence[float] | None

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(frozen=True)
class Drawn:
    """What one engine drew with the weights that it was given last, as far as the learner trains on it.

    gaps: the learner's log-probs less its own, float32 [n]. rows: some of it that both can score again.
    """

    gaps: torch.Tensor
    rows: Sequence[DrawnRow]


@dataclass(frozen=True)
class Answer:
    """What engines that were asked say after a push of rows that were drawn before it.

    scores: of all tokens but the first, a list a row, by the engine's name. learner: of the drawn tokens, float64 [n].
    age: pushes since the rows were drawn.
    """

    rows: Sequence[DrawnRow]
    scores: Mapping[str, Scores]
    learner: torch.Tensor
    age: int = 1

    def rows_of(self, name: str) -> list[DrawnRow]:
        """With what that engine and the learner say now."""
        learner = self.learner.split([len(row.tokens) for row in self.rows])
        return [
            replace(row, engine=scores[-len(row.tokens) :], learner=said.tolist())
            for row, scores, said in zip(self.rows, self.scores[name], learner, strict=True)
        ]


def evidence_of(
    rows: Sequence[DrawnRow],
    engine: Scores,
    learner: torch.Tensor,
    noise: float | None = None,
    age: int = 1,
) -> Evidence:
    """Rows that were drawn before a push, as they are scored after it.

    engine: all tokens but the first, a list a row. learner: `drawn_part` of the same. noise, age: as in `Evidence`;
    noise is needed where the learner's numbers of before are not known, for which the engine's stand then.
    """
    ends = [torch.arange(len(row.tokens)) == len(row.tokens) - 1 for row in rows]
    return Evidence(
        drawn_part(rows, engine),
        learner,
        torch.cat(ends),
        engine_before=flat([row.engine for row in rows]),
        learner_before=flat([row.engine if row.learner is None else row.learner for row in rows]),
        least=_LEAST_OF_DRAWN,
        noise=noise,
        age=age,
    )


def drawn_part(rows: Sequence[DrawnRow], scores: Scores) -> torch.Tensor:
    """Of the scores of all tokens but the first, a list a row, those of the tokens that were drawn; float64 [n]."""
    return flat([of_row[-len(row.tokens) :] for row, of_row in zip(rows, scores, strict=True)])


def flat(scores: Sequence[Sequence[float]]) -> torch.Tensor:
    """float64 [n]."""
    return torch.tensor([score for row in scores for score in row], dtype=torch.float64)


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
