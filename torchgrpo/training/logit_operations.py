"""Operations on a chunk of logits, compiled on a GPU to few passes.

A custom operation has one name for autograd, for fake tensors and for counters of bytes. Its definition is the
function below; on CUDA that function runs compiled by `torch.compile`, so no intermediate [C, V] tensor exists.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "torchgrpo"


def compute_token_statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-prob of the targets, log-sum-exp and entropy, [C] each, of logits / temperature.

    logits: [C, V] float32 or float64, -inf for excluded tokens. targets: [C] int64. temperature: [C].
    """
    scaled = logits / temperature[:, None]
    largest = scaled.amax(dim=1)
    shifted = scaled - largest[:, None]
    weights = shifted.exp()
    total = weights.sum(dim=1)
    # An excluded token has weight 0 and logit -inf; their product is 0 here.
    expected = (weights * torch.where(weights > 0, shifted, 0.0)).sum(dim=1) / total
    log_normaliser = total.log() + largest
    chosen = scaled.gather(1, targets[:, None])[:, 0]
    return chosen - log_normaliser, log_normaliser, total.log() - expected


def compute_logit_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    slope: Tensor,
    entropy_slope: Tensor,
    tokens: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Computes the gradient [C, V] of logits / temperature, rounded to `dtype`.

    Inputs are those and the results of `compute_token_statistics`. slope, entropy_slope: [C], gradients of log-prob
    and entropy. tokens: [V], 0 to V - 1. With p = softmax and t the target, d log p_t / d z_j = [j = t] - p_j and
    d H / d z_j = -p_j (log p_j + H). The terms of a likely target nearly cancel, so their sum is rounded, not each.
    """
    log_probs = logits / temperature[:, None] - log_normaliser[:, None]
    probabilities = log_probs.exp()
    surprise = torch.where(probabilities > 0, log_probs, 0.0) + entropy[:, None]
    own = torch.where(tokens == targets[:, None], slope[:, None], 0.0)
    return (own - probabilities * (slope[:, None] + entropy_slope[:, None] * surprise)).to(dtype)


@cache
def compile_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled for any number of rows and tokens."""
    return torch.compile(function, dynamic=True)


def run_compiled(function: Callable[..., Any], *inputs: Any) -> Any:
    """Runs the compiled function on copies of the vectors among its inputs.

    Vectors that begin at another element of their storage would be compiled anew.
    """
    copies = (each.clone() if isinstance(each, Tensor) and each.dim() == 1 else each for each in inputs)
    return compile_operation(function)(*copies)


@torch.library.custom_op(f"{NAMESPACE}::token_statistics", mutates_args=())
def token_statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `compute_token_statistics`."""
    return compute_token_statistics(logits, targets, temperature)


@token_statistics.register_kernel("cuda")
def _(*inputs: Tensor) -> Any:
    return run_compiled(compute_token_statistics, *inputs)


@token_statistics.register_fake
def _(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return logits.new_empty(len(logits)), logits.new_empty(len(logits)), logits.new_empty(len(logits))


@torch.library.custom_op(f"{NAMESPACE}::logit_gradient", mutates_args=())
def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    slope: Tensor,
    entropy_slope: Tensor,
    tokens: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Computes `compute_logit_gradient`."""
    return compute_logit_gradient(
        logits, targets, temperature, log_normaliser, entropy, slope, entropy_slope, tokens, dtype
    )


@logit_gradient.register_kernel("cuda")
def _(*inputs: Any) -> Any:
    return run_compiled(compute_logit_gradient, *inputs)


@logit_gradient.register_fake
def _(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits, dtype=rest[-1])
