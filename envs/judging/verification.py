"""One completion to be judged, and the batch that it was submitted with."""

from dataclasses import dataclass

from envs.example import Completion, Example
from envs.group import Verdict

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
        """What a worker is given: after a kill the empty completion, which shows whether the example is at fault."""
        return self.completion if self.killed_after is None else EMPTY
