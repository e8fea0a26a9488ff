"""Fixed sequences that every engine and the learner score: the same numbers, and moved as these should?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rollout.engines.sampler import WeightTarget
from rollout.weights.evidence import Evidence, Scores, flat, rms
from rollout.weights.outgoing import Learner


def canary_sequences(
    vocab_size: int, max_model_len: int, count: int = 3, length: int = 160
) -> list[list[int]]:
    """Fixed random token ids [count][length]; shorter where the engine's `max_model_len` is."""
    generator = torch.Generator().manual_seed(20_482)
    ids = torch.randint(0, vocab_size, (count, min(length, max_model_len)), generator=generator)
    return [row.tolist() for row in ids]


@dataclass
class FixedSequences:
    """The sequences, and what both sides said of them last.

    token_ids: each sequence longer than a block of the engine's prefix cache. engines, learner: who scores them.
    version: of the weights that both had when they last agreed; -1 before that.
    """

    token_ids: Sequence[Sequence[int]]
    engines: WeightTarget
    learner: Learner
    version: int = -1
    _engines_before: Mapping[str, Scores] = field(default_factory=dict)
    _learner_before: torch.Tensor | None = None
    _engines_now: Mapping[str, Scores] = field(default_factory=dict)
    _learner_now: torch.Tensor | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of the engines that have agreed."""
        return frozenset(self._engines_before)

    def score_again(self) -> dict[str, float]:
        """The engines' scores of now stand for those of before; by engine, their largest difference to the learner's.

        That also fills an engine's prefix cache with the keys and values that its weights of now give.
        """
        assert self._learner_before is not None
        self._engines_before = self.engines.score(self.token_ids)
        return {
            name: float((flat(scores) - self._learner_before).abs().max())
            for name, scores in self._engines_before.items()
        }

    def learner_at(self, temperature: float) -> torch.Tensor:
        """The learner's log-probs of now, float64 [n]."""
        return flat(self.learner.score(self.token_ids, temperature))

    def evidence(self) -> dict[str, Evidence]:
        """Of every engine, scored now. The learner's own numbers need not be finite."""
        self._learner_now, self._engines_now = self.learner_at(1.0), self.engines.score(self.token_ids)
        last = torch.cat([torch.arange(len(ids) - 1) == len(ids) - 2 for ids in self.token_ids])
        found = {}
        for name, scores in self._engines_now.items():
            before = flat(self._engines_before[name]) if name in self._engines_before else None
            found[name] = Evidence(flat(scores), self._learner_now, last, before, self._learner_before)
        return found

    def apart(self, name: str) -> float:
        """How far the engine was from the learner when they agreed last, the root of its mean square."""
        assert self._learner_before is not None
        return rms(flat(self._engines_before[name]) - self._learner_before)

    def agreed(self, version: int) -> None:
        """What `evidence` scored is what later evidence is compared with."""
        self._engines_before, self._learner_before = self._engines_now, self._learner_now
        self.version = version
