"""The learner as a group of ranks: each has a shard of every parameter and works on a share of every batch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from config.schema import Config
from plan.plan import Plan
from training.batch import Batch
from training.minibatches import Microbatch
from training.rank_host import Described
from training.ranks import Ranks
from training.split_learner import SplitLearner
from training.worker import Part, Piece


@dataclass(frozen=True)
class RankTensor:
    """A `rollout.weights.outgoing.PublishedTensor` that the ranks gather when it is asked for."""

    described: Described
    stream: "TensorStream"
    index: int

    @property
    def name(self) -> str:
        return self.described.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.described.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.described.dtype

    @property
    def device(self) -> torch.device:
        """Where it arrives."""
        return torch.device("cpu")

    @property
    def identity(self) -> Hashable:
        return self.described.identity

    def make(self) -> Tensor:
        """The whole tensor, to be read only."""
        return self.stream.tensor(self.index).view(self.dtype).view(self.shape)


class TensorStream:
    """Whole tensors one after the other; the ranks gather the next one while this one is written."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.described: list[Described] = ranks.same("describe")[0]
        self._begun: tuple[int, ...] = ()

    def tensor(self, index: int) -> Tensor:
        """The bytes of tensor `index`."""
        raise NotImplementedError
