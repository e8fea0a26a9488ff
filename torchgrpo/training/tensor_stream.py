"""Gathers full tensors from a sharded learner's ranks in blocks, the next block in advance.

Ranks ──gather a block──▶ bytes on rank 0 ──▶ RankTensor.make, one tensor after the other

The ranks gather the next block while the current one is written.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgrpo.cluster.actor_calls import CallReference
from torchgrpo.training.rank_actor import TensorDescription, aligned_nbytes
from torchgrpo.training.ranks import Ranks

BLOCK_BYTES = 1 << 26
"""Bytes of the tensors that one call gathers; a larger tensor is a block of its own. Rank 0 holds two blocks at
a time.
"""


@dataclass(frozen=True)
class RankTensor(TensorDescription):
    """A `PublishedTensor` that the ranks gather when `make` is called."""

    stream: "TensorStream"
    index: int

    @property
    def device(self) -> torch.device:
        """The device on which the full tensor arrives."""
        return torch.device("cpu")

    def make(self) -> Tensor:
        """Returns the full tensor; it must not be written to."""
        return self.stream.read_tensor_bytes(self.index).view(self.dtype).view(self.shape)


class TensorStream:
    """Gathers full tensors from the ranks block by block, the next block in advance.

    A tied tensor is gathered once for both of its names.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        descriptions: list[TensorDescription]
        descriptions, *_ = ranks.wait_for_answers(ranks.begin_same_call("describe_tensors"), "the tensor names")
        self.tensors = [RankTensor(**vars(one), stream=self, index=i) for i, one in enumerate(descriptions)]
        self._blocks, self._offsets = _plan_blocks(descriptions)
        self._next_block: tuple[int, list[CallReference]] | None = None
        self._current_block: tuple[int, Tensor] | None = None

    def read_tensor_bytes(self, index: int) -> Tensor:
        """Returns the bytes of tensor `index`, gathering its block if necessary."""
        number, begins = self._offsets[index]
        if self._current_block is None or self._current_block[0] != number:
            begun_number, calls = self._next_block or (number, self._gather(number))
            if begun_number != number:
                calls = self._gather(number)
            gathered = self.ranks.wait_for_answers(calls, "the tensor shards of a weight push")[0]
            following = number + 1
            self._next_block = (following, self._gather(following)) if following < len(self._blocks) else None
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                self._current_block = number, torch.from_numpy(gathered)
        return self._current_block[1][begins : begins + self.tensors[index].nbytes]

    def discard_blocks(self) -> None:
        """Discards gathered blocks, since the weights may have changed."""
        self._next_block = self._current_block = None

    def _gather(self, number: int) -> list[CallReference]:
        """Begins to gather a block on all ranks."""
        return self.ranks.begin_same_call("gather_tensors", self._blocks[number])


def _plan_blocks(descriptions: Sequence[TensorDescription]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Divides tensors into blocks.

    Returns the indices of the tensors of each block, and for every name its block and the byte at which it
    begins there.
    """
    blocks: list[list[int]] = []
    offsets: dict[int, tuple[int, int]] = {}
    filled = 0
    for index, one in enumerate(descriptions):
        if one.identity in offsets:
            continue
        if not blocks or filled + one.nbytes > BLOCK_BYTES:
            blocks.append([])
            filled = 0
        offsets[one.identity] = len(blocks) - 1, filled
        blocks[-1].append(index)
        filled += aligned_nbytes(one.nbytes)
    return blocks, [offsets[one.identity] for one in descriptions]
