"""Tensors of a learner of several ranks on their way into a push: ranks gather the next ones while these are written.

Ranks ──gather a block──▶ bytes on rank 0 ──▶ RankTensor.make, one tensor after the other
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgrpo.cluster.calls import Reference
from torchgrpo.training.rank_actor import Described, aligned
from torchgrpo.training.ranks import Ranks

BLOCK_BYTES = 1 << 26
"""Of tensors that are gathered in one call; a larger one is alone. Twice as much is on rank 0 beside its shards."""


@dataclass(frozen=True)
class RankTensor(Described):
    """A `PublishedTensor` that the ranks gather when it is asked for."""

    stream: "TensorStream"
    index: int

    @property
    def device(self) -> torch.device:
        """Where it arrives."""
        return torch.device("cpu")

    def make(self) -> Tensor:
        """The whole tensor, to be read only."""
        return self.stream.tensor(self.index).view(self.dtype).view(self.shape)


class TensorStream:
    """Whole tensors, some at a time; the ranks gather the next ones while these are written.

    Two names of one tensor are one tensor here.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        described: list[Described]
        described, *_ = ranks.answers(ranks.begin_same("describe"), "the names of its tensors")
        self.tensors = [RankTensor(**vars(one), stream=self, index=i) for i, one in enumerate(described)]
        self._blocks, self._places = _blocks(described)
        self._ahead: tuple[int, list[Reference]] | None = None
        self._here: tuple[int, Tensor] | None = None

    def tensor(self, index: int) -> Tensor:
        """The bytes of tensor `index`."""
        number, begins = self._places[index]
        if self._here is None or self._here[0] != number:
            begun, calls = self._ahead or (number, self._gather(number))
            if begun != number:
                calls = self._gather(number)
            gathered = self.ranks.answers(calls, "its shards of the tensors of a push")[0]
            later = number + 1
            self._ahead = (later, self._gather(later)) if later < len(self._blocks) else None
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                self._here = number, torch.from_numpy(gathered)
        return self._here[1][begins : begins + self.tensors[index].nbytes]

    def forget(self) -> None:
        """What was gathered is of weights that may have changed since."""
        self._ahead = self._here = None

    def _gather(self, number: int) -> list[Reference]:
        return self.ranks.begin_same("tensors", self._blocks[number])


def _blocks(described: Sequence[Described]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The indices of the tensors of each block, and of every name its block and the byte at which it begins there."""
    blocks: list[list[int]] = []
    places: dict[int, tuple[int, int]] = {}
    filled = 0
    for index, one in enumerate(described):
        if one.identity in places:
            continue
        if not blocks or filled + one.nbytes > BLOCK_BYTES:
            blocks.append([])
            filled = 0
        places[one.identity] = len(blocks) - 1, filled
        blocks[-1].append(index)
        filled += aligned(one.nbytes)
    return blocks, [places[one.identity] for one in described]
