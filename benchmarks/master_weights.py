"""How far bfloat16 weights move under AdamW, beside float32 ones, and what a step costs.

    python benchmarks/master_weights.py [--steps 1000] [--lr 1e-6] [--size 1000000]

Weights are drawn with standard deviation 0.02. Gradients point one way with some noise, or are noise around a small
mean. `moved` is the projection of the movement onto float32's movement, as a share of that; `missed` the distance
between the two, likewise; `seen` is `moved` of the bfloat16 weights themselves, which the forward pass reads.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.master_weights import MasterWeights, join

BETAS = (0.9, 0.95)
GRADIENTS: dict[str, tuple[float, float]] = {"one direction": (1.0, 0.3), "random": (0.1, 1.0)}
"""Mean and standard deviation."""


@dataclass
class Way:
    """One way to keep the weights. `exact`: what it knows of them, float32. `bytes`: a parameter, gradient aside."""

    name: str
    weight: nn.Parameter
    step: Callable[[], None]
    exact: Callable[[], Tensor]
    bytes: int


def adamw(weight: nn.Parameter, lr: float) -> AdamW:
    return AdamW([weight], lr=lr, betas=BETAS, weight_decay=0.0, fused=True)


def float32(start: Tensor, lr: float) -> Way:
    weight = nn.Parameter(start.clone())
    return Way("float32", weight, adamw(weight, lr).step, lambda: weight.data.clone(), 4 + 8)


def plain(start: Tensor, lr: float) -> Way:
    weight = nn.Parameter(start.to(torch.bfloat16))
    return Way("bfloat16 alone", weight, adamw(weight, lr).step, lambda: weight.data.float(), 2 + 4)


def stochastic(start: Tensor, lr: float) -> Way:
    """Float32 states and arithmetic; the result is rounded up or down with the probabilities that keep its mean."""
    weight = nn.Parameter(start.to(torch.bfloat16))
    wide = nn.Parameter(torch.empty(0))
    inner: Optimizer = adamw(wide, lr)

    def step() -> None:
        assert weight.grad is not None
        wide.data, wide.grad = weight.data.float(), weight.grad.float()
        inner.step()
        bits = wide.data.view(torch.int32)
        bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
        bits &= -(1 << 16)
        weight.data.copy_(wide.data)

    return Way("stochastic rounding", weight, step, lambda: weight.data.float(), 2 + 8)


def remainders(start: Tensor, lr: float) -> Way:
    weight = nn.Parameter(start.to(torch.bfloat16))
    optimizer = MasterWeights(adamw(weight, lr))

    def exact() -> Tensor:
        return join(weight.data, optimizer.remainders[weight])

    return Way("with remainders", weight, optimizer.step, exact, 2 + 2 + 8)


def compare(kind: str, steps: int, lr: float, size: int) -> None:
    mean, spread = GRADIENTS[kind]
    start = (0.02 * torch.randn(size)).to(torch.bfloat16).float()
    ways = [make(start, lr) for make in (float32, plain, stochastic, remainders)]
    seconds = dict.fromkeys((way.name for way in ways), 0.0)
    for _ in range(steps):
        gradient = torch.randn(size).mul_(spread).add_(mean).to(torch.bfloat16)
        for way in ways:
            way.weight.grad = gradient.to(way.weight.dtype)
            began = time.perf_counter()
            way.step()
            seconds[way.name] += time.perf_counter() - began
    right = ways[0].exact() - start
    print(f"\n{kind} gradients, {steps} steps at {lr:g}, {size} weights of 0.02")
    print(f"{'':20} {'moved':>9} {'missed':>9} {'seen':>9} {'ms a step':>10} {'bytes a parameter':>18}")
    for way in ways:
        moved = way.exact() - start
        seen = way.weight.data.float() - start
        along, missed = _share(moved, right), float((moved - right).norm() / right.norm())
        cost = f"{1000 * seconds[way.name] / steps:10.2f} {way.bytes:18}"
        print(f"{way.name:20} {along:9.2%} {missed:9.2%} {_share(seen, right):9.2%} {cost}")


def _share(moved: Tensor, right: Tensor) -> float:
    return float((moved.double() @ right.double()) / right.double().square().sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--size", type=int, default=1_000_000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for each in GRADIENTS:
        compare(each, arguments.steps, arguments.lr, arguments.size)
