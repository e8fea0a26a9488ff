"""Decides whether a crashed verification is the completion's fault (invalid) or the example's (error).

    crashed ──▶ probe: the same example with an empty completion
                  │ scored           ▶ the completion is at fault: invalid, the minimum score
                  │ crashed, error   ▶ the example is at fault: error, remembered for all its completions

A worker that dies during a verification, without a deadline, may have died by accident: the verification runs
once more. If several workers die together, one verification may have taken the other workers along. All their
verifications are suspects, and until the last suspect is resolved, a single worker runs.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from envs.example import Completion, CompletionInRun, Example
from envs.group import Verdict
from envs.reward_workers.scoring import CRASHED_OUTCOME, ScoringResult, crash_result
from envs.reward_workers.worker_pool import LostWorker

EMPTY_COMPLETION = Completion("")


@dataclass
class RewardTicket:
    """A submitted batch, whose verdicts arrive in any order."""

    verdicts: list[Verdict | None]
    num_missing: int


@dataclass(slots=True, eq=False)
class Verification:
    """Verification of one completion of a batch, from its queue to its result.

    killed_seconds: duration of the crashed attempt, None before a crash. message: reason of that crash.
    death_count: workers that died during this verification alone, without a deadline; one death may be an
    accident.
    """

    ticket: RewardTicket
    position: int
    completion: Completion
    example: Example
    killed_seconds: float | None = None
    message: str = ""
    death_count: int = 0

    @property
    def next_completion(self) -> Completion:
        """The completion for the next worker; after a crash the empty one, as a probe."""
        if self.killed_seconds is None:
            return self.completion
        if isinstance(self.completion, CompletionInRun):
            return replace(self.completion, **vars(EMPTY_COMPLETION), token_ids=())
        return EMPTY_COMPLETION


class CrashAttribution:
    """Decides whether a crash is the fault of the completion or of the example.

    A decision is a result, or None if the verification has to run again first.
    """

    def __init__(self, minimum_score: Callable[[Example], float]) -> None:
        """minimum_score: score of an invalid completion to an example."""
        self._minimum_score = minimum_score
        self._suspects: set[Verification] = set()
        self._faults: dict[tuple[str, int], str] = {}
        """Fault by example (source, row) after a probe; empty if the probe was scored."""

    def needs_single_worker(self) -> bool:
        """Whether a single worker has to run the verifications, because some are suspects."""
        return bool(self._suspects)

    def record_lost_workers(self, running: Collection[Verification]) -> None:
        """Records the verifications that ran in workers lost at one moment."""
        if len(running) > 1:
            self._suspects.update(running)

    def resolve_lost_worker(self, item: Verification, lost_worker: LostWorker, only_loss: bool) -> ScoringResult | None:
        """Returns the result of a verification in a lost worker; None to run it again.

        only_loss: no other verification ran in a worker lost at the same moment.
        """
        item.death_count += lost_worker.has_died and only_loss
        if lost_worker.has_died and item.death_count < 2:
            return None
        return self.resolve_result(item, crash_result(lost_worker.seconds, lost_worker.reason))

    def resolve_result(self, item: Verification, result: ScoringResult) -> ScoringResult | None:
        """Returns the result after a crash is attributed; None to run the verification again."""
        key = (item.example.source, item.example.row)
        if item.killed_seconds is not None:
            failed = result.outcome in (CRASHED_OUTCOME, "error")
            fault = f"{item.message}; an empty completion fails too ({result.message})"
            self._faults[key] = fault if failed else ""
            result = self._attribute_crash(item, self._faults[key], item.killed_seconds)
        elif result.outcome == CRASHED_OUTCOME:
            if key not in self._faults:
                item.killed_seconds, item.message, item.death_count = result.seconds, result.message, 0
                return None
            result = self._attribute_crash(item, self._faults[key], result.seconds)
        self._suspects.discard(item)
        return result

    def _attribute_crash(self, item: Verification, fault: str, seconds: float) -> ScoringResult:
        return ScoringResult(self._minimum_score(item.example), {}, "error" if fault else "invalid", seconds, fault)
