"""Fake engine and fake reward service whose answers a test scripts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from envs.group import SampledCompletion, Verdict
from envs.task import Completion, Example
from tests.tiny_models import ScoredBatch
from torchgrpo.rollout.engines.interface import Request, Response


@dataclass
class ScriptedEngine:
    """Engine that answers a request after `answer` was called with its seed.

    seeds: of all requests, in the order of submission. timeouts: of all steps. cancelled_ids: arguments of `cancel`.
    version: if given, every request is
    answered at once, with one token of this policy version for each completion.
    """

    version: int | None = None
    seeds: list[int] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    cancelled_ids: list[int] = field(default_factory=list)
    _pending: dict[int, Request] = field(default_factory=dict)
    _answers: dict[int, Sequence[list[int]]] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def submit(self, request: Request) -> None:
        self.seeds.append(request.seed)
        self._pending[request.request_id] = request
        if self.version is not None:
            self._answers[request.seed] = [[self.version]] * request.n

    def cancel(self, request_id: int) -> None:
        self.cancelled_ids.append(request_id)
        self._pending.pop(request_id, None)

    def answer(self, seed: int, *versions: list[int]) -> None:
        self._answers[seed] = versions or [[0]]

    def step(self, timeout: float) -> list[Response]:
        self.timeouts.append(timeout)
        done = [request for request in self._pending.values() if request.seed in self._answers]
        for request in done:
            del self._pending[request.request_id]
        return [
            Response(
                request.request_id,
                [SampledCompletion([7] * len(of), [0.0] * len(of), of, "stop") for of in self._answers[request.seed]],
            )
            for request in done
        ]

    def close(self) -> None:
        pass


@dataclass
class ScriptedRewardService:
    """Reward service that withholds verdicts until `release`. rows: of the submitted examples."""

    withheld: bool = False
    rows: list[int] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    _tickets: list[ScoredBatch] = field(default_factory=list)

    def submit(self, completions: Sequence[Completion], examples: Sequence[Example]) -> ScoredBatch:
        self.rows.append(examples[0].row)
        ticket = ScoredBatch([Verdict(1.0, {}, "scored") for _ in completions], len(completions) * self.withheld)
        self._tickets.append(ticket)
        return ticket

    def poll(self, ticket: ScoredBatch, timeout: float = 0.0) -> list[Verdict] | None:
        self.timeouts.append(timeout)
        return None if ticket.num_missing else ticket.verdicts

    def release(self) -> None:
        self.withheld = False
        for ticket in self._tickets:
            ticket.num_missing = 0
