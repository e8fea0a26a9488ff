"""Exchanges the tensors of one packed sequence between the ranks that compute it together (Ulysses).

    its positions, all heads ──all-to-all──▶ all positions, its heads ──attention──▶ ──all-to-all──▶ its positions
    log-probs of its positions ──all-reduce──▶ log-probs of all positions

Every layer but attention works on each position alone, so a rank computes its slice of the sequence. All ranks of a
group have the same microbatch and the same loss. The gradients of a rank are those of its positions; FSDP2 sums them
over all ranks.

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from config.schema.errors import ConfigError
from torchgrpo.plan.context_parallel import context_problem
from torchgrpo.plan.microbatch_sizes import BLOCK_SIZE, padded_positions


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """Ranks that compute one packed sequence together, each an equal slice of the positions.

    size: number of ranks. rank: number of this rank among them, and of its slice.
    """

    size: int
    rank: int
    group: dist.ProcessGroup

    def check_model(self, model: PreTrainedModel, packs: bool) -> None:
        """Raises ConfigError if the group cannot compute a model together.

        packs: whether the rows of the model are packed.
        """
        raw = model.config.to_dict()
        kv_heads = raw.get("num_key_value_heads") or raw["num_attention_heads"]
        problem = context_problem(self.size, packs, kv_heads, "model", type(model).__name__)
        if problem is not None:
            raise ConfigError(problem)

    def padded_length(self, length: int, multiple: int) -> int:
        """Returns the length of a sequence that is padded to slices of equal length.

        There is at least one position of padding, so that the segment of the padding is never empty.
        multiple: positions of which each slice has a whole multiple.
        """
        unit = self.size * multiple
        shortest = padded_positions(0) if multiple == BLOCK_SIZE else 0
        return max(length // unit + 1, -(-shortest // unit)) * unit

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def exchange(self, states: Tensor) -> Tensor:
        """Exchanges [1, A, B, D] for [1, A / size, B * size, D].

        With A the heads and B the positions of this rank, the result is all positions of its heads. With A all
        positions and B its heads, the result is its positions of all heads.
        """
        parts = _AllToAll.apply(states[0].unflatten(0, (self.size, -1)), self.group)  # type: ignore[no-untyped-call]
        result: Tensor = parts.transpose(0, 1).flatten(1, 2)[None]
        return result

    def join_values(self, values: Tensor, indices: Tensor, count: int) -> Tensor:
        """Joins values [m] of each rank's tokens to the values [count] of all tokens.

        indices: int64 [m], tokens of this rank; every token belongs to one rank. The gradient of a rank's values is
        that of its own copy of the result, which every rank has.
        """
        result: Tensor = _JoinValues.apply(values, indices, count, self.group)  # type: ignore[no-untyped-call]
        return result


def join_context_group(size: int, timeout: timedelta | None = None) -> ContextGroup | None:
    """Joins this rank's group of `size` consecutive ranks; returns None for a group of one.

    Every rank calls this at once. The group has a communicator of its own, so that no gathering of parameters delays
    an exchange.
    """
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=timeout)
    return ContextGroup(size, dist.get_rank(group), group)


class _AllToAll(torch.autograd.Function):
    """Sends part i of a tensor [size, ...] to rank i.

    Part i of the result comes from rank i.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    result = torch.empty_like(parts)
    dist.all_to_all_single(result, parts, group=group)
    return result


class _JoinValues(torch.autograd.Function):
    """Sums values over the ranks, each rank's at its own indices, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(indices)
        total = values.new_zeros(count).index_copy_(0, indices, values)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return gradient.index_select(0, indices), None, None, None
