"""What a rollout engine is: token ids in, token ids and log-probs out. No model code here.

Every engine (transformers, vLLM, the pool of either) speaks two protocols, so whoever drives rollouts or pushes
weights never knows which one it is:

    SteppedEngine   submit(request)            any number of times, at any moment
                    step() -> responses        advance; whole requests come back as they finish, in any order
    WeightTarget    load(weights, version)     between two steps; requests in flight go on under the new version
                    score                      what the weight check asks
                    sleep, wake                where learner and engines take turns on a GPU
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from config.schema.errors import DeadlineError
from envs.group import SampledCompletion, Sampling


@dataclass(slots=True)
class Request:
    """One prompt whose `n` completions are wanted: one group.

    `seed` fixes every random draw of the request: equal seeds and weights give equal tokens, whatever else
    is in the batch.
    """

    request_id: int
    prompt: tuple[int, ...]
    n: int
    sampling: Sampling
    seed: int


@dataclass(slots=True)
class Response:
    """A finished request: its `n` completions, in sampling order."""

    request_id: int
    completions: list[SampledCompletion]


class Sampler(Protocol):
    """Draws completions for whoever awaits them; any number of requests at a time."""

    async def generate(self, request: Request) -> list[SampledCompletion]:
        """The `n` completions of one request, in sampling order."""
        ...


class SteppedEngine(Protocol):
    """What draws tokens, one step after the other: an engine in this process, or a pool."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be drawn with."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        ...

    def submit(self, request: Request) -> None: ...

    def step(self, timeout: float) -> list[Response]:
        """Advance generation; return the requests that finished (often none).

        timeout: seconds that a remote engine may wait for something to finish; an engine in this process
        draws one token for every running request and ignores it.
        """
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class SequenceScores:
    """Scores of sequences at temperature 1 over the full vocabulary.

    log_probs: of every token but the first given its prefix, [count][length - 1]. cached_tokens: how many of them had
    keys and values in the engine's prefix cache already.
    """

    log_probs: list[list[float]]
    cached_tokens: int = 0


class WeightTarget(Protocol):
    """What takes the learner's weights: an engine in this process, or all engines of a pool."""

    @property
    def members(self) -> tuple[int, ...]:
        """Process ids of the live engines; they change whenever one is replaced."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by (Hugging Face name, tensor) pairs, tied heads included, or the adapter by its own.

        What never changes and came with an earlier push (`Outgoing.constants`) is not moved again. Returns when every
        live engine draws its tokens with them. Requests in flight go on under the new version.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        """Score sequences with every engine; by its name, as in `SampledCompletion.engine`."""
        ...

    def sleep(self) -> None:
        """Give the GPU's memory to the learner. Nothing may be in flight."""
        ...

    def wake(self) -> None:
        """Take the memory back; the next `load` brings the weights."""
        ...


class Engine(SteppedEngine, WeightTarget, Protocol):
    """Both: what every engine of this project is."""


def generate(engine: SteppedEngine, requests: Sequence[Request], timeout: float = 600.0) -> list[Response]:
    """Submit all requests and wait for all of them; responses in the order of the requests.

    timeout: seconds that the engine may work without finishing any, before a DeadlineError.
    """
    for request in requests:
        engine.submit(request)
    finished: dict[int, Response] = {}
    deadline = time.monotonic() + timeout
    while len(finished) < len(requests):
        responses = engine.step(timeout=min(1.0, timeout))
        if responses:
            finished |= {response.request_id: response for response in responses}
            deadline = time.monotonic() + timeout
        elif time.monotonic() > deadline:
            missing = len(requests) - len(finished)
            raise DeadlineError(
                f"the rollout waited {timeout:.0f} s for the engine to finish any of {missing} of "
                f"{len(requests)} requests"
            )
    return [finished[request.request_id] for request in requests]
