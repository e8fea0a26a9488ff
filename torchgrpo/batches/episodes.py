"""Rows of a batch by completion: an episode's token sequences are adjacent rows."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class EpisodeRows:
    """Rows of each of the C completions of a batch of N rows.

    index: int64 [N], number of the row's completion, 0 ... C - 1, ascending. lengths: int64 [N], length of the row's
    completion in tokens, from the end of the first prompt to the end of the longest sequence. A stream in one sequence
    and the same stream split into several have the same length.
    """

    index: Tensor
    lengths: Tensor

    @classmethod
    def from_masks(cls, episode: Tensor | None, prompt_mask: Tensor, response_mask: Tensor) -> "EpisodeRows":
        """Builds the rows of a batch.

        episode: [N, 1], numbers that differ between adjacent completions; None: each row is a completion. prompt_mask:
        bool [N, P]. response_mask: bool [N, R].
        """
        prompts = prompt_mask.sum(dim=1)
        ends = prompts + response_mask.sum(dim=1)
        if episode is None:
            return cls(torch.arange(len(ends), device=ends.device), ends - prompts)
        index = torch.cat([episode.new_zeros(1), (episode[1:, 0] != episode[:-1, 0]).long().cumsum(0)])[: len(ends)]
        longest = torch.zeros_like(ends).scatter_reduce(0, index, ends, "amax")[index]
        return cls(index, longest - prompts[torch.searchsorted(index, index)])

    @property
    def is_first(self) -> Tensor:
        """Mask bool [N] of the first row of each completion."""
        differs = self.index[1:] != self.index[:-1]
        return torch.cat([differs.new_ones(1), differs])[: len(self.index)]

    @property
    def count(self) -> int:
        """Number of completions."""
        return int(self.is_first.sum())

    @property
    def ranges(self) -> list[range]:
        """Row numbers of each completion."""
        starts = self.is_first.nonzero()[:, 0].tolist()
        return [range(start, stop) for start, stop in pairwise([*starts, len(self.index)])]

    def sum(self, values: Tensor) -> Tensor:
        """Sums values [N, k] over the rows of each completion.

        Returns [N, k]: each row has the sum of its completion.
        """
        # `index_put` adds in a fixed order on every device, and does not wait for the device.
        return torch.zeros_like(values).index_put((self.index,), values, accumulate=True)[self.index]

    def token_mask(self, mask: Tensor) -> Tensor:
        """Returns the mask bool [C, W] of the tokens, with one row per completion.

        The tokens keep their order, and W is the length of the longest completion. If each row is a completion, it is
        `mask` [N, R] itself.
        """
        if self.count == len(self.index):
            return mask
        counts = self.sum(mask.sum(dim=1, keepdim=True))[self.is_first]
        width = max(int(self.lengths.max()), int(counts.max()))
        return torch.arange(width, device=mask.device) < counts

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """Copies values of completions to their rows.

        values: [C, 1], which become [N, 1]; or [C, W] of the tokens in `token_mask(mask)`, which become [N, R].
        """
        if values.shape[1] == 1:
            return values[self.index]
        if self.count == len(self.index):
            return values
        zeros = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        return zeros.masked_scatter(mask, values[self.token_mask(mask)])
