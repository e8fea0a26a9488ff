"""A direct transfer whose tensors lie in shards: the learner's first rank sends what all ranks gather.

    driver                 rank 0                              rank 1 ...
    push ────────────────▶ the transfer itself ──▶ engines
                           next tensor: all-gather  ═════════  all-gather, and forget it
    done, or what broke ◀─ the rest, if it ended early ══════  the rest

Every rank makes every tensor once and in the same order, whatever becomes of the transfer: so none waits for another.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchgrpo.rollout.engines.remote_calls import CallBroken
from torchgrpo.rollout.weights.outgoing import DirectTransfer, Engines, Outgoing, PublishedTensor


class _MadeOnce(Outgoing):
    """Pairs that are gone when somebody has read them."""

    def __init__(self, tensors: Sequence[PublishedTensor]) -> None:
        super().__init__(tensors)
        self._left = deque(self.tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while self._left:
            tensor = self._left.popleft()
            yield tensor.name, self.make(tensor)


@dataclass
class TransferFromRanks:
    """A `DirectTransfer` of a learner with several ranks.

    transfer: is copied into rank 0 at the first push, where its connections stay. It reads the pairs of a push once.
    """

    transfer: DirectTransfer

    def push(self, weights: Outgoing, version: int, engines: Engines) -> None:
        """Raises CallBroken when an engine was lost; the ranks go on. RankLost: the transfer failed otherwise."""
        assert weights.ranks is not None, "the plan takes this way for ranks alone"
        weights.ranks.send(self._send, version, engines.elsewhere())

    def _send(
        self, tensors: Sequence[PublishedTensor], first: bool, version: int, engines: Engines
    ) -> CallBroken | None:
        """In a rank. Returns what `push` is to raise."""
        weights = _MadeOnce(tensors)
        broken = None
        if first:
            try:
                self.transfer.push(weights, version, engines)
            except CallBroken as error:
                broken = error
        for _ in weights:
            pass
        return broken
