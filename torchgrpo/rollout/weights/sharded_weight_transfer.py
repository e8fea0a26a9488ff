"""Wraps a `DirectTransfer` for sharded learners: rank 0 sends, every rank joins each gather.

    driver                 rank 0                              rank 1 ...
    push ────────────────▶ direct transfer ──▶ engines
                           next tensor: all-gather  ═════════  all-gather, result dropped
    done, or the loss ◀─── remaining tensors, if it failed ══  remaining tensors

Every rank makes every tensor once and in the same order, even if the transfer fails, so that no rank waits for another.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchgrpo.rollout.engines.remote_engines import EngineLostInCall
from torchgrpo.rollout.weights.weight_update import DirectTransfer, LiveEngines, PublishedTensor, WeightUpdate


class _OnePassUpdate(WeightUpdate):
    """Weight update whose tensors can be iterated over only once."""

    def __init__(self, tensors: Sequence[PublishedTensor]) -> None:
        super().__init__(tensors)
        self._remaining = deque(self.tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while self._remaining:
            tensor = self._remaining.popleft()
            yield tensor.name, self.make(tensor)


@dataclass
class ShardedWeightTransfer:
    """`DirectTransfer` of a learner with several ranks.

    transfer: copied into rank 0 at the first push, where its connections stay. It must iterate over a push once.
    """

    transfer: DirectTransfer

    def push(self, weights: WeightUpdate, version: int, engines: LiveEngines) -> None:
        """Pushes weights from rank 0 to the engines.

        Raises:
            EngineLostInCall: an engine was lost; the ranks continue.
            RankLost: the transfer failed otherwise.
        """
        assert weights.ranks is not None, "the plan chooses this transfer for ranks only"
        weights.ranks.send(self._transfer_in_rank, version, engines.remote_engines())

    def _transfer_in_rank(
        self, tensors: Sequence[PublishedTensor], is_first_rank: bool, version: int, engines: LiveEngines
    ) -> EngineLostInCall | None:
        """Takes part in a push as one rank; returns the engine loss, if any."""
        weights = _OnePassUpdate(tensors)
        engine_loss = None
        if is_first_rank:
            try:
                self.transfer.push(weights, version, engines)
            except EngineLostInCall as error:
                engine_loss = error
        for _ in weights:
            pass
        return engine_loss
