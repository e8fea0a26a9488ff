"""An optimizer step's forward and backward pass with compiled decoder layers (`train.compile`) beside the same without.

    python benchmarks/compiled.py [model=FOLDER] [prompts=4] [repeats=8] [prompt=128] [limit=128] [rounds=9]
        [checkpointing=false]

Packed groups whose lengths are log-normal (sigma 0.8), other ones in each round; without a folder by the quickstart
model. Both take turns. Prints the seconds of the first step of each, in which layers are compiled, medians of the rest
and of their ratios, and the largest difference of log-probs and of the gradient, relative to the largest of the
gradient. The folder that TORCHINDUCTOR_CACHE_DIR names keeps what was compiled: an empty one shows a first run.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from benchmarks.packing import drawn, loaded, timed  # noqa: E402
from training.batch import Tokens  # noqa: E402
from training.compiled import compile_layers  # noqa: E402
from training.forward import ResponseScorer  # noqa: E402
from training.packing import packed_positions  # noqa: E402


@dataclass
class Asked:
    """The arguments."""

    model: str = str(ROOT / "models" / "quickstart")
    prompts: int = 4
    repeats: int = 8
    prompt: int = 128
    limit: int = 128
    rounds: int = 9
    checkpointing: bool = False


def batch(asked: Asked, number: int, vocabulary: int) -> Tokens:
    sizes = argparse.Namespace(**vars(asked), equal=False)
    return drawn(sizes, vocabulary, seed=number)


def scorer(asked: Asked, compiled: bool) -> ResponseScorer:
    model = loaded(asked.model)
    if asked.checkpointing:
        model.gradient_checkpointing_enable()
    if compiled:
        compile_layers(model)
    return ResponseScorer(model)


def step(way: ResponseScorer, tokens: Tokens) -> tuple[float, torch.Tensor, torch.Tensor]:
    return timed(way.model, lambda given: way(given).log_prob, tokens)


def main() -> None:
    asked: Asked = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Asked), OmegaConf.from_cli()))
    ways = {"eager": scorer(asked, compiled=False), "compiled": scorer(asked, compiled=True)}
    vocabulary = ways["eager"].model.config.vocab_size
    first = {name: step(way, batch(asked, 0, vocabulary)) for name, way in ways.items()}
    eager, compiled = first.values()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, asked.rounds + 1):
        tokens = batch(asked, number, vocabulary)
        for name in ways if number % 2 else reversed(ways):
            seconds[name].append(step(ways[name], tokens)[0])
    computed = packed_positions(batch(asked, 0, vocabulary))
    print(f"{torch.get_num_threads()} threads, {computed} positions in the first step")
    for name, times in seconds.items():
        print(f"{name:10} first {first[name][0]:7.2f} s   then {statistics.median(times):7.3f} s")
    ratios = [one / other for one, other in zip(seconds["compiled"], seconds["eager"], strict=True)]
    print(f"compiled / eager: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")
    off = (eager[1] - compiled[1]).abs().max()
    gradient = (eager[2] - compiled[2]).abs().max() / eager[2].abs().max()
    print(f"log-probs differ by {off:.1e} at most, the gradient by {gradient:.1e} of its largest element")


if __name__ == "__main__":
    main()
