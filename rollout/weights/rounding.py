"""What rounding explains of the difference between an engine's scores and the learner's."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.weights.evidence import Scores, Tolerance
from rollout.weights.outgoing import Learner

_DRAWS = 8


@dataclass(frozen=True)
class Rounding:
    """Measured on the learner's own weights.

    arithmetic: the engine's: `float32`, `tf32`, `float16`, `bfloat16`. float8: its matrices are quantized online.
    given: a bound that a person has set, whatever is measured.
    """

    learner: Learner
    arithmetic: str
    float8: bool = False
    given: Tolerance | None = None

    def tolerance(self, sequences: Sequence[Sequence[int]]) -> Tolerance:
        """By the weights of now; two or three forward passes, none where it is given."""
        if self.given is not None:
            return self.given
        return self.bound(self.learner.rounding_error(sequences, self.arithmetic, self.float8))

    def closely(self, sequences: Sequence[Sequence[int]]) -> Scores:
        """What it may do to each score by the weights of now, [count][length - 1], from eight computations that round
        at different places: one alone may happen to be exact where another one is not."""
        return self.learner.rounding_error(sequences, self.arithmetic, self.float8, _DRAWS)

    def bound(self, errors: Scores) -> Tolerance:
        return Tolerance.measured(self.arithmetic, errors) if self.given is None else self.given
