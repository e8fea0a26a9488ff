"""Engine protocols, request and response records, and `generate`, which waits for a list of requests.

Every engine (transformers, vLLM, a pool of either) implements two protocols, so callers need not distinguish engines:

    SteppedEngine   submit(request)            any number of times, at any moment
                    step() -> responses        advances; whole requests return as they finish, in any order
                    cancel(request_id)         between two steps; the request is never returned
    WeightTarget    load(weights, version)     between two steps; requests in flight continue with the new version
                    score                      for the weight check
                    sleep, wake                if learner and engines take turns on a GPU

This module contains no model code.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from config.schema.errors import DeadlineError
from envs.group import SampledCompletion, Sampling


@dataclass(slots=True)
class Request:
    """Request for `n` completions of one prompt, which form a group.

    `seed` fixes all random numbers of the request: equal seeds and weights yield equal tokens, whatever else is in
    the batch.
    """

    request_id: int
    prompt: tuple[int, ...]
    n: int
    sampling: Sampling
    seed: int


@dataclass(slots=True)
class Response:
    """Response to a finished request: its `n` completions, in sampling order."""

    request_id: int
    completions: list[SampledCompletion]


class Sampler(Protocol):
    """Asynchronous sampler of completions, for any number of concurrent requests."""

    async def generate(self, request: Request) -> list[SampledCompletion]:
        """Samples the `n` completions of one request, in sampling order."""
        ...

    def outside_engine(self) -> AbstractContextManager[None]:
        """Marks a wait for anything but the engine and the rewards; see `EngineLoop.outside_engine`."""
        ...


class SteppedEngine(Protocol):
    """Engine that samples tokens step by step: an engine in this process, or a pool."""

    @property
    def policy_version(self) -> int:
        """Policy version that the next token will be sampled with."""
        ...

    @property
    def in_flight(self) -> int:
        """Number of requests submitted and neither returned nor cancelled."""
        ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: int) -> None:
        """Drops a request, if it is in flight.

        Other requests sample the same tokens as without it.
        """
        ...

    def step(self, timeout: float) -> list[Response]:
        """Advances generation; returns the requests that finished (often none).

        Args:
            timeout: seconds that a remote engine may wait for a request to finish. An engine in this process ignores
                it and samples one token for every running request.
        """
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class SequenceScores:
    """Log-probs of sequences at temperature 1 over the full vocabulary.

    log_probs: of every token but the first, given its prefix, [count][length - 1].
    cached_tokens: number of tokens whose keys and values were already in the engine's prefix cache.
    """

    log_probs: list[list[float]]
    cached_tokens: int = 0


class WeightTarget(Protocol):
    """Target of weight pushes: an engine in this process, or all engines of a pool."""

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Process ids of the live engines, which change whenever an engine is replaced."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights, or the weights of the adapter, by (Hugging Face name, tensor) pairs.

        Tied heads are included. Constant tensors of an earlier push (`WeightUpdate.constants`) are not transferred
        again. Returns when every live engine samples with the new weights. Requests in flight continue with them.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        """Scores sequences with every engine; returns scores by engine name, as in `SampledCompletion.engine`."""
        ...

    def sleep(self) -> None:
        """Releases GPU memory for the learner; no request may be in flight."""
        ...

    def wake(self) -> None:
        """Prepares a sleeping engine for the next `load`.

        The engine samples and scores only after that load.
        """
        ...


class Engine(SteppedEngine, WeightTarget, Protocol):
    """Engine that samples and takes weights, as every engine of this project does."""


def generate(engine: SteppedEngine, requests: Sequence[Request], timeout: float = 600.0) -> list[Response]:
    """Submits requests and waits for all of them; returns responses in order.

    timeout: seconds without a finished request after which a DeadlineError is raised.
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
