"""Where an optimizer step's seconds go, beside bare matrix products of its shapes.

    python benchmarks/steps.py MODEL_FOLDER [--dtype float32|bfloat16] [--autocast fp32|bf16] [--rounds 7]
        [--prompts 4] [--repeats 4] [--prompt 48] [--limit 48] [--settled 0] [--kl 0] [--threads 2]

Groups of random tokens, prompts and answers all at their limits, which makes the floating-point operations exact; in
`--settled` of the groups all answers have one reward, so their advantage is zero. Prints medians of the seconds of

- the layers' forward pass, the head's, the loss; the head's backward pass, the layers'; clipping; optimizer; the rest;
- the whole step, and its matrix products alone, of the same shapes in the same dtype: their ratio is the step's share
  of the roofline.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from config.env import EnvConfig  # noqa: E402
from config.inference import InferenceModelConfig  # noqa: E402
from config.models import ModelConfig, TrainModelConfig  # noqa: E402
from config.optimizer import OptimizerConfig  # noqa: E402
from config.policy import PolicyConfig  # noqa: E402
from config.schema import Config  # noqa: E402
from config.train import TrainConfig  # noqa: E402
from envs.group import Group, SampledCompletion, Sampling, Times, Verdict  # noqa: E402
from envs.task import Example  # noqa: E402
from plan.machine import this_machine  # noqa: E402
from plan.make_plan import make_plan  # noqa: E402
from training.adapters import causal_model  # noqa: E402
from training.batch import Batch  # noqa: E402
from training.forward import ResponseScorer  # noqa: E402
from training.local_learner import LocalLearner, make_learner  # noqa: E402
from training.log_probs import _SelectedLogProbs  # noqa: E402
from training.packing import packed_positions  # noqa: E402
from training.process import prepare_process  # noqa: E402
from training.worker import Worker  # noqa: E402

STAGES = {
    "layers, forward": (ResponseScorer, "_packed"),
    "head, forward": (_SelectedLogProbs, "forward"),
    "head, backward": (_SelectedLogProbs, "backward"),
    "forward and loss": (Worker, "_loss"),
    "backward": (Worker, "_backward"),
    "clip": (Worker, "_clip"),
    "optimizer": (Worker, "update"),
}


class Clock:
    """Seconds inside each stage of the steps since `taken` was emptied."""

    def __init__(self, stack: ExitStack) -> None:
        self.taken: Counter[str] = Counter()
        for name, (owner, attribute) in STAGES.items():
            plain = owner.__dict__[attribute]
            function = plain.__func__ if isinstance(plain, staticmethod) else plain
            timed = self._timed(name, function)
            stack.enter_context(
                patch.object(
                    owner, attribute, staticmethod(timed) if isinstance(plain, staticmethod) else timed
                )
            )

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.taken[name] += time.perf_counter() - began

        return timed


def config_of(asked: argparse.Namespace) -> Config:
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=asked.prompts, repeats=asked.repeats),
        model=ModelConfig(name=asked.model, dtype=asked.dtype),
        train=TrainConfig(mixed_precision=asked.autocast),
        train_model=TrainModelConfig(num_threads=asked.threads),
        policy=PolicyConfig(kl_coef=asked.kl),
        optimizer=OptimizerConfig(lr=1e-6, clip_grad_norm=1.0),
        inference_model=InferenceModelConfig(max_tokens=asked.limit, backend="transformers"),
        device="cpu",
    )
    config.derive()
    return config


def drawn(asked: argparse.Namespace, vocabulary: int) -> list[Group]:
    chance = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=chance).tolist()

    def completion(score: float) -> SampledCompletion:
        verdict = Verdict(score, {}, "scored")
        count = asked.limit
        return SampledCompletion(tokens(count), [-1.0] * count, [0] * count, "stop", verdict=verdict)

    def group(number: int) -> Group:
        settled = number < asked.settled * asked.prompts
        completions = [completion(float(place % 2 and not settled)) for place in range(asked.repeats)]
        example = Example(({"role": "user", "content": ""},), "", number)
        return Group(
            number, example, tuple(tokens(asked.prompt)), "", Sampling(), completions, Times(0.0, 0.0, 0.0)
        )

    return [group(number) for number in range(asked.prompts)]


def multiplications(model: nn.Module, positions: int, targets: int) -> list[tuple[int, int, int, int]]:
    """(rows, inputs, outputs, how often) of every linear layer in a step: forward, and twice in the backward pass."""
    causal = causal_model(model)
    head = causal.get_output_embeddings()
    shapes: Counter[tuple[int, int, int]] = Counter()
    for module in causal.modules():
        if isinstance(module, nn.Linear):
            rows = targets if module is head else positions
            shapes[rows, module.in_features, module.out_features] += 3
    return [(*shape, count) for shape, count in shapes.items()]


def bare_seconds(shapes: list[tuple[int, int, int, int]], dtype: torch.dtype) -> float:
    """Of these products alone."""
    total = 0.0
    for rows, inputs, outputs, count in shapes:
        left, right = torch.randn(rows, inputs).to(dtype), torch.randn(inputs, outputs).to(dtype)
        out = torch.empty(rows, outputs, dtype=dtype)
        torch.mm(left, right, out=out)
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            torch.mm(left, right, out=out)
            taken.append(time.perf_counter() - began)
        total += count * statistics.median(taken)
    return total


def measured(learner: LocalLearner, batch: Batch, rounds: int, clock: Clock) -> dict[str, float]:
    found: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        clock.taken.clear()
        began = time.perf_counter()
        learner.step(batch)
        whole = time.perf_counter() - began
        taken = clock.taken
        inner = taken["layers, forward"] + taken["head, forward"]
        stages = {name: taken[name] for name in ("layers, forward", "head, forward")}
        stages["loss"] = taken["forward and loss"] - inner
        stages["head, backward"] = taken["head, backward"]
        stages["layers, backward"] = taken["backward"] - taken["head, backward"]
        stages |= {name: taken[name] for name in ("clip", "optimizer")}
        stages["rest"] = whole - sum(stages.values())
        found.append(stages | {"step": whole})
    return {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--autocast", default="fp32", help="train.mixed_precision")
    sizes = (
        ("prompts", 4),
        ("repeats", 4),
        ("prompt", 48),
        ("limit", 48),
        ("rounds", 7),
        ("threads", 2),
    )
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--settled", type=float, default=0.0, help="share of groups of one reward")
    parser.add_argument("--kl", type=float, default=0.0)
    asked = parser.parse_args()
    config = config_of(asked)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plan = make_plan(config, False, this_machine(Path(folder)), Path(folder))
        prepare_process(config, plan.learner.num_threads, torch.device("cpu"))
        learner = make_learner(config, plan, Path(folder))
        batch = learner.credit(drawn(asked, causal_model(learner.worker.model).config.vocab_size))
        batch.sample_log_prob = learner.worker.log_prob([batch])[0]
        stages = measured(learner, batch, asked.rounds, Clock(stack))
        report(asked, learner, batch, stages)


def report(asked: argparse.Namespace, learner: LocalLearner, batch: Batch, stages: dict[str, float]) -> None:
    assert batch.mask is not None
    positions, targets = packed_positions(batch.tokens), int(batch.mask.sum())
    half = asked.dtype == "bfloat16" or asked.autocast == "bf16"
    shapes = multiplications(learner.worker.model, positions, targets)
    bare = bare_seconds(shapes, torch.bfloat16 if half else torch.float32)
    flops = sum(2 * rows * inputs * outputs * count for rows, inputs, outputs, count in shapes)
    print(
        f"{len(batch)} completions, {positions} positions, {targets} in the loss, {asked.dtype}, "
        f"mixed_precision={asked.autocast}, {torch.get_num_threads()} threads"
    )
    for name, seconds in stages.items():
        print(f"{name:20}{seconds * 1e3:10.1f} ms{seconds / stages['step']:8.1%}")
    print(
        f"{'bare products':20}{bare * 1e3:10.1f} ms{bare / stages['step']:8.1%}   "
        f"{flops / 1e9:.0f} GFLOP, {flops / bare / 1e9:.0f} GFLOP/s"
    )


if __name__ == "__main__":
    main()
