"""Lowers the scores of invalid completions to the lowest score of their group or run.

An invalid completion scores the minimum that its reward declares (by default 0), or the lowest score of its
group if that is less. In a group without a score the lowest score of the run takes its place. This module does
not import torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from envs.group import Group, Verdict


class MinimumScores:
    """The lowest score of a run so far, for each data source of a mixture."""

    def __init__(self) -> None:
        self.minimum_by_source: dict[str, float] = {}

    def record_and_lower(self, groups: Sequence[Group]) -> None:
        """Records the scores of groups, then lowers the scores of their invalid completions."""
        for group in groups:
            self.record_scores(group.example.source, group.candidate_verdicts)
        self.lower_invalid_scores(groups)

    def lower_invalid_scores(self, groups: Sequence[Group]) -> None:
        """Lowers the scores of invalid completions to the current minimum. Callable from any thread."""
        for group in groups:
            lowest = self.minimum_score(group.example.source, group.candidate_verdicts)
            for candidate in group.candidates:
                if candidate.verdict is not None:
                    candidate.verdict = lower_invalid_score(candidate.verdict, lowest)

    def record_scores(self, source: str, verdicts: Iterable[Verdict]) -> None:
        """Records the lowest score of verdicts on examples of one source."""
        scores = _scores(verdicts)
        if scores:
            self.minimum_by_source[source] = min(self.minimum_by_source.get(source, scores[0]), *scores)

    def minimum_score(self, source: str, verdicts: Iterable[Verdict]) -> float | None:
        """Returns the lowest score of a group, otherwise of the run; None without scores."""
        return min(_scores(verdicts), default=self.minimum_by_source.get(source))


def lower_invalid_score(verdict: Verdict, lowest: float | None) -> Verdict:
    """Lowers the score of an invalid verdict to at most `lowest`."""
    if verdict.outcome != "invalid" or lowest is None or verdict.score <= lowest:
        return verdict
    return replace(verdict, score=lowest)


def _scores(verdicts: Iterable[Verdict]) -> list[float]:
    return [verdict.score for verdict in verdicts if verdict.outcome == "scored"]
