"""Keeps engines full and a buffer fed: starts groups, advances the engine, hands over what is finished.

    source.begin ─▶ generating ──engine.step──▶ source.judge ─▶ judging ──source.judged──▶ buffer.put
                        ▲
                        ├── as long as there is room in flight and the buffer admits another
                        └── in the place of a judged group that is not worth training on

No threads and no tensors here: `rollout.streaming.Stream` drives it beside a learner, `benchmarks/scheduler.py`
on a virtual clock. Every operation is O(1) a group, whatever the number of engines.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rollout.engines.sampler import Request, Response
from rollout.group_buffer import GroupBuffer

Group = TypeVar("Group")


class Generator(Protocol):
    """The part of `rollout.engines.sampler.SteppedEngine` that the controller drives."""

    def submit(self, request: Request) -> None: ...
    def step(self, timeout: float) -> list[Response]: ...


class GroupSource(Protocol[Group]):
    """Draws prompts and judges answers."""

    def begin(self, count: int) -> list[tuple[Request, Group]]:
        """New groups and what the engine is asked for them."""
        ...

    def judge(self, answered: list[tuple[Group, Response]]) -> None:
        """Start judging what the engine answered."""
        ...

    def judged(self, timeout: float) -> list[int]:
        """Request ids of the groups whose verdicts have come; waits for one at most `timeout` seconds."""
        ...

    def replacement(self, group: Group) -> tuple[Request, Group] | None:
        """None for a judged group that is worth training on, else a new one to take its place."""
        ...


@dataclass(slots=True)
class _Started(Generic[Group]):
    """sequence: place in the order of admission. version: the oldest that drew one of its tokens, once known."""

    sequence: int
    group: Group
    version: int = -1


class Controller(Generic[Group]):
    """One thread drives it.

    Args:
        in_flight: groups that all engines together hold at a time.
    """

    def __init__(
        self, engine: Generator, source: GroupSource[Group], buffer: GroupBuffer[Group], in_flight: int
    ) -> None:
        self.engine = engine
        self.source = source
        self.buffer = buffer
        self.in_flight = in_flight
        self.generating = 0
        self._started: dict[int, _Started[Group]] = {}

    @property
    def groups_in_flight(self) -> int:
        """Groups that are generated or judged now."""
        return len(self._started)

    def admit(self) -> None:
        """Start groups until the engines are full or the buffer wants no more."""
        sequences: list[int] = []
        while self.generating + len(sequences) < self.in_flight and self.buffer.may_admit():
            sequences.append(self.buffer.admit())
        if sequences:
            begun = self.source.begin(len(sequences))
            for sequence, (request, group) in zip(sequences, begun, strict=True):
                self._start(sequence, request, group)

    def _start(self, sequence: int, request: Request, group: Group) -> None:
        self._started[request.request_id] = _Started(sequence, group)
        self.generating += 1
        self.engine.submit(request)

    def advance(self, timeout: float) -> None:
        """One engine step, then everything that has become ready goes into the buffer.

        A group that is replaced hands its sequence number on: the buffer waits for that number, not for a prompt.

        timeout: seconds that the engine, or the judge when nothing is generated, may wait for something.
        """
        if self.generating:
            self._hand_to_judge(self.engine.step(timeout))
        for request_id in self.source.judged(0.0 if self.generating else timeout):
            started = self._started.pop(request_id)
            replacement = self.source.replacement(started.group)
            if replacement is None:
                self.buffer.put(started.sequence, started.version, started.group)
            else:
                self._start(started.sequence, *replacement)

    def _hand_to_judge(self, responses: list[Response]) -> None:
        answered: list[tuple[Group, Response]] = []
        for response in responses:
            started = self._started[response.request_id]
            started.version = min(v for c in response.completions for v in c.policy_versions)
            answered.append((started.group, response))
        if answered:
            self.generating -= len(answered)
            self.source.judge(answered)

    def outstanding(self) -> list[Group]:
        """Groups that no batch has taken: the ready ones in their order, then those in flight."""
        flying = sorted(self._started.values(), key=lambda started: started.sequence)
        return self.buffer.contents() + [started.group for started in flying]
