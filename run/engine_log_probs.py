"""What a batch says of the engines that drew it: their log-probs beside the learner's, of the present weights alone.

Where it holds too few of those, the engines are asked for more, about rows that earlier weights drew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from envs.group import Group, SampledCompletion
from rollout.weights.evidence import Answer, Drawn, DrawnRow, Scores
from training.batch import Batch

_ROWS, _LONGEST = 4, 1024
"""Rows that are kept of each engine, and tokens of the longest. By them a lost push is told from a wrong one."""
_LOOKED_AT = 64
"""Rows among which cheap ones are chosen."""


def own_tokens(batch: Batch, groups: Sequence[Group], version: int) -> Mapping[str, int]:
    """By the engine's name, how many tokens in the loss policy `version` drew; engines that drew none are left out.

    groups: of the batch, in its order.
    """
    counts: dict[str, int] = {}
    own = _own(batch, version).sum(1).tolist()
    for tokens, (_, one) in zip(own, _completions(groups), strict=True):
        if tokens:
            counts[one.engine] = counts.get(one.engine, 0) + tokens
    return counts


def _own(batch: Batch, version: int) -> Tensor:
    """bool [N, R]: in the loss, and drawn by policy `version`."""
    assert batch.mask is not None
    return batch.mask & (batch.policy_version == version)


def _whole(batch: Batch, own: Tensor) -> Tensor:
    """bool [N]: a response whose every token is one of these."""
    return (own == batch.tokens.response_mask).all(1)


def _places(chosen: Tensor) -> list[int]:
    places: list[int] = chosen.nonzero()[:, 0].tolist()
    return places


def _completions(groups: Sequence[Group]) -> list[tuple[Group, SampledCompletion]]:
    return [(group, one) for group in groups for one in group.completions]


@dataclass(frozen=True)
class Question:
    """Rows of a batch that one policy version before drew, for the engines to score with their newest weights.

    places: in the batch. rows: perhaps not to their ends. age: pushes since they were drawn.
    """

    places: Sequence[int]
    rows: Sequence[DrawnRow]
    age: int

    @property
    def sequences(self) -> list[list[int]]:
        return [row.sequence for row in self.rows]

    def answer(self, scores: Callable[[], Mapping[str, Scores]], log_ratio: Tensor) -> Answer:
        """log_ratio: as in `drawn_tokens`."""
        parts = [
            torch.tensor(row.engine, dtype=torch.float64) + log_ratio[place, : len(row.tokens)].double()
            for place, row in zip(self.places, self.rows, strict=True)
        ]
        return Answer(self.rows, scores(), torch.cat(parts), self.age)


def question_about(
    batch: Batch, groups: Sequence[Group], version: int, enough: int, count: int, length: int
) -> Question | None:
    """Cheap rows that the newest policy before `version` drew which drew `count` of them and `enough` tokens, or more.

    None: none did. length: of a sequence that shows a prefix cache which outlived a push; no row is cut shorter.
    """
    assert batch.mask is not None
    versions = batch.policy_version[batch.mask]
    ages = range(1, version - int(versions.min()) + 1) if len(versions) else ()
    asked = (_question(batch, groups, version, age, enough, count, length) for age in ages)
    return next((question for question in asked if question is not None), None)


def _question(
    batch: Batch, groups: Sequence[Group], version: int, age: int, enough: int, count: int, length: int
) -> Question | None:
    share = -(-enough // count)
    completions, offers = _completions(groups), []
    for place in _places(_whole(batch, _own(batch, version - age)))[:_LOOKED_AT]:
        group, one = completions[place]
        tokens = min(len(one.token_ids), max(share, length - len(group.prompt)))
        positions = len(group.prompt) + tokens
        if tokens and positions <= _LONGEST and _whole_distribution(group, one):
            offers.append((positions < length, positions / tokens, place, tokens))
    places, rows = [], []
    for _, _, place, tokens in sorted(offers):
        group, one = completions[place]
        places.append(place)
        rows.append(DrawnRow(group.prompt, one.token_ids[:tokens], one.log_probs[:tokens], None))
        enough -= tokens
        if enough <= 0 and len(rows) >= count:
            return Question(places, rows, age)
    return None


def drawn_tokens(
    batch: Batch, groups: Sequence[Group], log_ratio: Tensor, version: int
) -> Mapping[str, Drawn]:
    """By the engine's name, the tokens in the loss that policy `version` drew, if it drew any.

    groups: of the batch, in its order. log_ratio: float32 [N, R], trainer less engine, of the trainer's `version`.
    """
    own = _own(batch, version)
    drawn = _places(own.any(1))
    if not drawn:
        return {}
    completions, whole = _completions(groups), _whole(batch, own).tolist()
    places: dict[str, list[int]] = {}
    rows: dict[str, list[DrawnRow]] = {}
    for place in drawn:
        group, one = completions[place]
        places.setdefault(one.engine, []).append(place)
        kept = rows.setdefault(one.engine, [])
        if len(kept) < _ROWS and whole[place] and _can_be_scored(group, one):
            kept.append(_row(group, one, log_ratio[place]))
    return {name: Drawn(log_ratio[rows_of][own[rows_of]], rows[name]) for name, rows_of in places.items()}


def _can_be_scored(group: Group, one: SampledCompletion) -> bool:
    """Engines have the logits of a whole sequence then."""
    return _whole_distribution(group, one) and len(group.prompt) + len(one.token_ids) <= _LONGEST


def _whole_distribution(group: Group, one: SampledCompletion) -> bool:
    """At temperature 1, which is what engines score, and every token drawn."""
    sampling = group.sampling
    return sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0 and not one.sampled


def _row(group: Group, one: SampledCompletion, log_ratio: Tensor) -> DrawnRow:
    engine = torch.tensor(one.log_probs, dtype=torch.float64)
    learner = engine + log_ratio[: len(engine)].double()
    return DrawnRow(group.prompt, one.token_ids, one.log_probs, learner.tolist())
