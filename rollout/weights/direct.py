"""The protocol of a transfer straight into the engines' GPUs, and the engines as it calls them."""

from collections.abc import Sequence
from typing import Any, Protocol

from rollout.weights.outgoing import Outgoing


class Engines(Protocol):
    """The live engines of a pool as a direct transfer calls them; `rollout.engines.fleet.Fleet`."""

    @property
    def members(self) -> tuple[int, ...]:
        """Changes whenever an engine is replaced."""
        ...

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """The method of every engine at once, each with its own arguments."""
        ...

    def stacks(self) -> str: ...


class DirectTransfer(Protocol):
    """From the learner's GPUs into those of the engines, past any host's memory."""

    def push(self, weights: Outgoing, version: int, engines: Engines) -> None:
        """Return when every one of the engines draws its tokens with these weights."""
        ...
