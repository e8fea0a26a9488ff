"""Conversations behind the engine protocol: a request is answered when its last turn is done.

    submit ─▶ engine: n completions ─▶ each asks the environment ─▶ silent: done
                 ▲                                                 └▶ answers: prompt + all so far, n=1 ─┐
                 └──────────────────────────────────────────────────────────────────────────────────────┘

Whoever drives rollouts sees completions with more than one turn in them, and `sampled` false on what the
environment wrote. Rollouts of one turn have no such engine around theirs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from rollout.engines.sampler import Completion, Request, Response, SteppedEngine


class Answers(Protocol):
    """What `envs.turns.Conversation` does."""

    @property
    def waiting(self) -> int: ...
    def ask(self, key: "_Row", token_ids: Sequence[int], turn: int) -> None: ...
    def answered(self, timeout: float) -> list[tuple["_Row", list[int]]]: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class _Row:
    """One completion in the making: row `index` of `request`."""

    request: Request
    index: int
    completion: Completion
    turn: int = 0

    def extend(self, drawn: Completion) -> None:
        self.turn += 1
        whole = self.completion
        whole.token_ids += drawn.token_ids
        whole.log_probs += drawn.log_probs
        whole.policy_versions += drawn.policy_versions
        whole.finish_reason = drawn.finish_reason
        assert whole.sampled is not None
        whole.sampled += [True] * len(drawn.token_ids)

    def append_answer(self, token_ids: list[int]) -> None:
        """Log-probs are 0 and the version is that of the token before: nothing drew these."""
        whole = self.completion
        whole.token_ids += token_ids
        whole.log_probs += [0.0] * len(token_ids)
        whole.policy_versions += whole.policy_versions[-1:] * len(token_ids)
        assert whole.sampled is not None
        whole.sampled += [False] * len(token_ids)

    @property
    def room(self) -> int:
        """Tokens that may still come: `max_tokens` holds for the whole response, every turn and answer."""
        return self.request.sampling.max_tokens - len(self.completion.token_ids)


class TurnEngine:
    """Speaks the protocol of `rollout.engines.sampler.SteppedEngine`. It closes both engine and answers."""

    def __init__(self, engine: SteppedEngine, answers: Answers) -> None:
        self.engine = engine
        self.answers = answers
        self._ids = count()
        self._drawing: dict[int, list[_Row]] = {}
        self._unfinished: dict[int, int] = {}
        self._groups: dict[int, list[_Row]] = {}

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    @property
    def in_flight(self) -> int:
        return len(self._groups)

    def submit(self, request: Request) -> None:
        """Raises ValueError for an id that is in flight."""
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id} is already in flight")
        rows = [_Row(request, index, Completion([], [], [], "abort", [])) for index in range(request.n)]
        self._groups[request.request_id] = rows
        self._unfinished[request.request_id] = request.n
        self._draw(request, rows)

    def _draw(self, request: Request, rows: list[_Row]) -> None:
        own = next(self._ids)
        self._drawing[own] = rows
        self.engine.submit(replace(request, request_id=own))

    def step(self, timeout: float) -> list[Response]:
        finished: list[Response] = []
        for response in self.engine.step(timeout):
            rows = self._drawing.pop(response.request_id)
            for row, drawn in zip(rows, response.completions, strict=True):
                row.extend(drawn)
                if drawn.finish_reason == "stop":
                    self.answers.ask(row, drawn.token_ids, row.turn)
                else:
                    self._end(row, finished)
        if self.answers.waiting:
            for row, token_ids in self.answers.answered(0.0 if self._drawing else timeout):
                self._go_on(row, token_ids, finished)
        return finished

    def _go_on(self, row: _Row, token_ids: list[int], finished: list[Response]) -> None:
        if not token_ids:
            return self._end(row, finished)
        if row.room <= len(token_ids):
            row.completion.finish_reason = "length"
            return self._end(row, finished)
        row.append_answer(token_ids)
        request = row.request
        self._draw(
            replace(
                request,
                prompt=(*request.prompt, *row.completion.token_ids),
                n=1,
                sampling=replace(request.sampling, max_tokens=row.room),
                seed=turn_seed(request.seed, row.index, row.turn),
            ),
            [row],
        )

    def _end(self, row: _Row, finished: list[Response]) -> None:
        request_id = row.request.request_id
        self._unfinished[request_id] -= 1
        if not self._unfinished[request_id]:
            del self._unfinished[request_id]
            rows = self._groups.pop(request_id)
            finished.append(Response(request_id, [done.completion for done in rows]))

    def close(self) -> None:
        try:
            self.answers.close()
        finally:
            self.engine.close()


def turn_seed(seed: int, index: int, turn: int) -> int:
    """Of the draws after turn `turn` of completion `index`: the same whatever else is generated when."""
    digest = hashlib.blake2b(f"{seed}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
