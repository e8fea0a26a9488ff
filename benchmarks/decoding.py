"""Where the seconds of the transformers engine go, beside what its weights and products cost at least.

    python benchmarks/decoding.py MODEL_FOLDER [--dtype float32|bfloat16] [--prompts 4] [--repeats 4] [--prompt 48]
        [--limit 48] [--rounds 5] [--threads 2]

Groups of random tokens, all answers at their limit. Prints medians of the seconds of the first step, in which the
prompts go through the model, and of a step that draws one token for every row; beside the latter

- `bare products`: the model's linear layers alone, one after the other, with as many rows;
- `weights`: their bytes at the speed of a copy of them (read and written bytes a second), the least that any step of so
  few rows takes, and `arithmetic`, their multiplications at the speed of the largest with a thousand rows.

All are measured in the same run, between its rounds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import linear  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from envs.group import Sampling  # noqa: E402
from rollout.engines.sampler import Request  # noqa: E402
from rollout.engines.transformers_engine import TransformersEngine  # noqa: E402

MANY = 1024
"""Rows with which a product is bound by arithmetic."""


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def requests(asked: argparse.Namespace, vocabulary: int, seed: int) -> list[Request]:
    chance = torch.Generator().manual_seed(seed)
    sampling = Sampling(max_tokens=asked.limit)
    return [
        Request(
            place,
            tuple(torch.randint(vocabulary, (asked.prompt,), generator=chance).tolist()),
            asked.repeats,
            sampling,
            seed + place,
        )
        for place in range(asked.prompts)
    ]


def steps_of(engine: TransformersEngine, asked: list[Request]) -> list[float]:
    for one in asked:
        engine.submit(one)
    taken = []
    while engine.in_flight:
        taken.append(seconds(engine.step))
    return taken


class Bounds:
    """What the matrices of `model` cost without the rest of it, for so many rows."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        self.inputs = {each.shape[1]: self._random(rows, each) for each in self.matrices}
        self.largest = max(self.matrices, key=Tensor.numel)
        self.many = self._random(MANY, self.largest)
        self.elements = sum(each.numel() for each in self.matrices)
        self.bytes = self.elements * self.largest.element_size()
        self.multiplications = 2 * rows * self.elements

    @staticmethod
    def _random(rows: int, matrix: Tensor) -> Tensor:
        return torch.randn(rows, matrix.shape[1]).to(matrix.dtype)

    def products(self) -> float:
        return seconds(lambda: [linear(self.inputs[each.shape[1]], each) for each in self.matrices])

    def weights(self) -> float:
        copies = [torch.empty_like(each) for each in self.matrices]
        pairs = list(zip(copies, self.matrices, strict=True))
        for copy, matrix in pairs:
            copy.copy_(matrix)
        return seconds(lambda: [copy.copy_(matrix) for copy, matrix in pairs]) / 2

    def arithmetic(self) -> float:
        took = seconds(lambda: linear(self.many, self.largest))
        return took * self.multiplications / (2 * MANY * self.largest.numel())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    sizes = (
        ("prompts", 4),
        ("repeats", 4),
        ("prompt", 48),
        ("limit", 48),
        ("rounds", 5),
        ("threads", 2),
    )
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, asked.dtype))
    engine = TransformersEngine(model, [])
    rows = asked.prompts * asked.repeats
    with torch.inference_mode():
        bounds = Bounds(model, rows)
        steps_of(engine, requests(asked, model.config.vocab_size, 0))
        found: list[dict[str, float]] = []
        for number in range(1, asked.rounds + 1):
            taken = steps_of(engine, requests(asked, model.config.vocab_size, 1000 * number))
            found.append(
                {
                    "whole": sum(taken),
                    "first step": taken[0],
                    "step": statistics.median(taken[1:]),
                    "bare products": bounds.products(),
                    "weights": bounds.weights(),
                    "arithmetic": bounds.arithmetic(),
                }
            )
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    print(f"{rows} rows of {asked.limit} tokens after {asked.prompt}, {asked.dtype}, {asked.threads} threads")
    for name, value in medians.items():
        print(f"{name:16}{value * 1e3:10.2f} ms{value / medians['step']:9.2f} of a step")
    print(
        f"{bounds.bytes / 1e6:.0f} MB of weights at {bounds.bytes / medians['weights'] / 1e9:.1f} GB/s; "
        f"{bounds.multiplications / 1e9:.2f} GFLOP a step at "
        f"{bounds.multiplications / medians['arithmetic'] / 1e9:.0f} GFLOP/s"
    )


if __name__ == "__main__":
    main()
