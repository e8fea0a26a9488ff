"""Records of a pool of vLLM servers: settings, weights, and servers with their state."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from envs.group import SampledCompletion
from torchgrpo.rollout.engines.http_server import ServerRequirements, VLLMServer


@dataclass(frozen=True)
class HTTPPoolSettings:
    """Settings of a pool of servers.

    model: folder or hub name of the weights before the first push. requirements: by address. window: completions that
    one server holds at a time. score_bound: largest mean difference of log-probs between two servers, relative to
    1 + |log-prob|. max_attempts: losses in a row of one server, or with one group, at which the run ends.
    """

    model: str
    requirements: dict[str, ServerRequirements]
    end_token_ids: tuple[int, ...]
    max_model_len: int
    update: str
    window: int
    score_bound: float
    start_timeout_s: float = 600.0
    request_timeout_s: float = 900.0
    max_attempts: int = 3


class WeightSource(NamedTuple):
    """Weights that all servers must have.

    scores: of the checked sequence; empty before any server scored it.
    """

    path: str | Path
    version: int
    scores: tuple[float, ...] = ()


@dataclass(eq=False)
class ServerSlot:
    """A server of the pool and its state.

    number: identifies a server from one loss to the next; never recurs. connection: the coroutine that makes an absent
    server live; None for a live server. requests: calls by request id.
    """

    number: int
    name: str
    server: VLLMServer
    connection: "Future[WeightSource] | None" = None
    absent_since: float = field(default_factory=time.monotonic)
    requests: "dict[int, Future[list[SampledCompletion]]]" = field(default_factory=dict)
    consecutive_losses: int = 0
    loss_reason: str = ""
    is_overdue: bool = False
