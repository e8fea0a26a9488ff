"""Attribution of crashed verifications: to the completion (invalid) or the reward (error).

    crashed ──▶ probe: the same example with an empty completion
                  │ judged           ▶ the completion is to blame: invalid, the least score
                  │ crashed, error   ▶ the example is to blame: error, remembered for all its completions

A worker that dies over a verification, through no deadline, may have died of an accident: the verification is judged
once more. Where several workers died together, one of their verifications may have taken the others along: all are
suspects, and until the last of them is judged, one worker judges alone.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from envs.example import Completion, CompletionInRun, Example
from envs.group import Verdict
from envs.judging.outcome import CRASHED, Result, crashed
from envs.judging.pool import LostWorker

EMPTY = Completion("")


@dataclass
class Ticket:
    """A submitted batch. Its verdicts arrive in any order."""

    verdicts: list[Verdict | None]
    missing: int


@dataclass(slots=True, eq=False)
class Verification:
    """One completion of a batch on its way through the service.

    killed_after: seconds that the attempt took that had to be killed, once one had. message: why it was.
    deaths: workers that died over it and nothing else, through no deadline: once may be an accident.
    """

    ticket: Ticket
    position: int
    completion: Completion
    example: Example
    killed_after: float | None = None
    message: str = ""
    deaths: int = 0

    @property
    def judged_next(self) -> Completion:
        """The completion for a worker; after a kill the empty one, as a probe."""
        if self.killed_after is None:
            return self.completion
        if isinstance(self.completion, CompletionInRun):
            return replace(self.completion, **vars(EMPTY), token_ids=())
        return EMPTY


class Blame:
    """Decides on crashes. least_score: of a completion to the example that no judge got through.

    Every decision is a result, or None where the verification has to be judged again before there is one.
    """

    def __init__(self, least_score: Callable[[Example], float]) -> None:
        self._least_score = least_score
        self._suspects: set[Verification] = set()
        self._faults: dict[tuple[str, int], str] = {}
        """By example, once probed: what is wrong with it; empty where nothing is."""

    def one_at_a_time(self) -> bool:
        """Whether verifications have to be judged one after the other, by one worker."""
        return bool(self._suspects)

    def workers_lost(self, running: Collection[Verification]) -> None:
        """Workers were lost at one moment, while these verifications ran."""
        if len(running) > 1:
            self._suspects.update(running)

    def of_lost_worker(self, item: Verification, lost: LostWorker, alone: bool) -> Result | None:
        """Result of a verification that a lost worker ran; None to run it again.

        alone: no other ran in a worker lost with it.
        """
        item.deaths += lost.died and alone
        if lost.died and item.deaths < 2:
            return None
        return self.of_result(item, crashed(lost.seconds, lost.reason))

    def of_result(self, item: Verification, result: Result) -> Result | None:
        """Result after the blame is settled; None to run the verification again."""
        key = (item.example.source, item.example.row)
        if item.killed_after is not None:
            failed = result.outcome in (CRASHED, "error")
            probed = f"{item.message}; so it is with an empty completion ({result.message})"
            self._faults[key] = probed if failed else ""
            result = self._blamed(item, self._faults[key], item.killed_after)
        elif result.outcome == CRASHED:
            if key not in self._faults:
                item.killed_after, item.message, item.deaths = result.seconds, result.message, 0
                return None
            result = self._blamed(item, self._faults[key], result.seconds)
        self._suspects.discard(item)
        return result

    def _blamed(self, item: Verification, fault: str, seconds: float) -> Result:
        return Result(self._least_score(item.example), {}, "error" if fault else "invalid", seconds, fault)
