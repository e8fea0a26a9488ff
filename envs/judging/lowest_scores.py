"""Scores of invalid completions: at most the lowest that a judge gives. No torch here.

An invalid completion scores the minimum that its reward declares (0 unless said otherwise), or the lowest score of its
group where that is less; in a group without a score the lowest of the run takes its place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from envs.group import Group, Verdict


class LowestScores:
    """The lowest score of a run so far, for each data set of a mixture."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def settle(self, groups: Sequence[Group]) -> None:
        """Takes the scores of these groups in, then lowers those of their invalid completions."""
        for group in groups:
            self.take(group.example.source, group.candidate_verdicts)
        self.lower(groups)

    def lower(self, groups: Sequence[Group]) -> None:
        """Lowers the scores of invalid completions to what is known by now. From any thread."""
        for group in groups:
            lowest = self.lowest(group.example.source, group.candidate_verdicts)
            for one in group.candidates:
                if one.verdict is not None:
                    one.verdict = at_most(one.verdict, lowest)

    def take(self, source: str, verdicts: Iterable[Verdict]) -> None:
        """Remembers the lowest of these scores. source: of their examples."""
        scores = _scores(verdicts)
        if scores:
            self.seen[source] = min(self.seen.get(source, scores[0]), *scores)

    def lowest(self, source: str, verdicts: Iterable[Verdict]) -> float | None:
        """The lowest score of a group, else of the run; None before there is one."""
        return min(_scores(verdicts), default=self.seen.get(source))


def at_most(verdict: Verdict, lowest: float | None) -> Verdict:
    """The verdict; an invalid one scores at most `lowest`."""
    if verdict.outcome != "invalid" or lowest is None or verdict.score <= lowest:
        return verdict
    return replace(verdict, score=lowest)


def _scores(verdicts: Iterable[Verdict]) -> list[float]:
    return [verdict.score for verdict in verdicts if verdict.outcome == "scored"]
