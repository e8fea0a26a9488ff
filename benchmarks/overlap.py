"""Lockstep and overlapped training on the same split of the machine, beside the ideal of two busy stages.

    python benchmarks/overlap.py [--engine thread|actor] [--iterations 12] [--sigma 1.0] [key=value ...]

The engine has one core and the learner another, in both schedules: a thread of this process, or a Ray actor.
Answers have forced lengths, log-normal over groups and the same for both schedules; the learner's stage is made as
long as the engine's by the number of passes over a batch (--epochs 0: as many as balance best).

Lockstep takes the sum of its two stages. The ideal is the longer of the two: nothing is faster than that with
the same batches, but for the lockstep engine's wait for the longest answer of each batch, which the overlapped one
does not have; so the share of the ideal may exceed 1. Every consumed token's age is asserted.
"""

import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from transformers import AutoTokenizer

from benchmarks.common import QUICKSTART, arguments, configured, machine, save_llama
from config.schema.config import Config
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.generate import Generation
from torchgrpo.run.build import build
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped, Schedule, ScheduleType

ENGINE_CORE, LEARNER_CORE = 0, 1
SHAPE = (4096, 192, 768, 4, 6, 6)
"""Of a model large enough that arithmetic and not Python decides. Of 4096 tokens the end is rarely drawn."""
LONGEST, MEDIAN = 192, 32
WARM_UP = 2
SIZES = (
    "env.num_envs=16",
    "env.repeats=4",
    "env.oversample=8",  # the engine generates twice what is trained on, which balances the two here
    f"inference_model.max_tokens={LONGEST}",
    "policy.kl_coef=0",
    "train.max_policy_age=2",
    "train.stale_groups=wait",  # `drop` would train on shorter answers: not the same work
    "train.total_dialog_turns=1000000",
    "train_model.num_threads=1",
    "optimizer.lr=1e-5",
)


@dataclass(frozen=True)
class Measured:
    """Seconds of an iteration by stage, and response tokens a second of the whole."""

    collect: float
    learn: float
    tokens_per_s: float


class Lengths:
    """The forced length of each group: a function of its number, so that both schedules have the same."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma

    def of(self, group_id: int) -> int:
        drawn = MEDIAN * math.exp(self.sigma * random.Random(group_id).gauss(0.0, 1.0))
        return max(1, min(LONGEST, round(drawn)))

    def force(self, generation: Generation) -> None:
        plain = generation.request

        def forced(prompt: tuple[int, ...], group_id: int) -> Request:
            request = plain(prompt, group_id)
            return replace(request, sampling=replace(request.sampling, max_tokens=self.of(group_id)))

        generation.request = forced  # type: ignore[method-assign]


def actor() -> int:
    """Process id of the engine in its Ray actor."""
    return next(
        child.pid for child in psutil.Process().children(recursive=True) if "EngineActor" in child.name()
    )


@contextmanager
def built(config: Config, lengths: Lengths, schedule: type[ScheduleType]) -> Iterator[ScheduleType]:
    with tempfile.TemporaryDirectory() as run_dir:
        working = build(config, Path(run_dir), schedule)
        run = working
        lengths.force(run.collector.generation)
        if not run.plan.devices.in_process:
            for task in Path(f"/proc/{actor()}/task").iterdir():
                os.sched_setaffinity(int(task.name), {ENGINE_CORE})
        os.sched_setaffinity(0, {LEARNER_CORE})
        try:
            working.push_weights()
            yield working
        finally:
            run.close("finished")


def learn(run: Schedule, rollout: Rollout, epochs: int) -> int:
    """Train on a rollout, as both schedules do; returns its response tokens."""
    run.advantage(rollout)
    for _ in range(epochs):
        run.learn(rollout)
    return int(rollout.batch.tokens.response_mask.sum())


def lockstep(config: Config, lengths: Lengths, iterations: int, epochs: int) -> Measured:
    with built(config, lengths, Lockstep) as working:
        collects, learns, tokens = [], [], 0
        for index in range(iterations + WARM_UP):
            began = time.perf_counter()
            rollout = working.collect()
            middle = time.perf_counter()
            count = learn(working, rollout, epochs)
            working.push_weights()
            if index >= WARM_UP:
                collects.append(middle - began)
                learns.append(time.perf_counter() - middle)
                tokens += count
    total = sum(collects) + sum(learns)
    return Measured(statistics.mean(collects), statistics.mean(learns), tokens / total)


def overlapped(config: Config, lengths: Lengths, iterations: int, epochs: int) -> Measured:
    with built(config, lengths, Overlapped) as working, working.generation():
        if working.plan.devices.in_process:
            working.collector.loop.call(lambda: os.sched_setaffinity(0, {ENGINE_CORE}))
        waits, learns, tokens = [], [], 0
        for index in range(iterations + WARM_UP):
            began = time.perf_counter()
            rollout = working.take()
            middle = time.perf_counter()
            batch = rollout.batch
            assert batch.age is not None
            drawn = batch.age[batch.tokens.loss_mask]
            assert int(drawn.max()) <= config.train.max_policy_age, "a token is too old"
            count = learn(working, rollout, epochs)
            working.push_weights()
            if index >= WARM_UP:
                waits.append(middle - began)
                learns.append(time.perf_counter() - middle)
                tokens += count
    return Measured(statistics.mean(waits), statistics.mean(learns), tokens / (sum(waits) + sum(learns)))


def main() -> None:
    parser = arguments(__doc__, iterations=12, repeats=2, epochs=0)
    parser.add_argument("--engine", choices=("thread", "actor"), default="actor")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a length")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lengths = Lengths(asked.sigma)
    sample = sorted(lengths.of(group) for group in range(1000))
    print(
        f"{machine()}\nengine: {asked.engine}; lengths log-normal, sigma {asked.sigma}: "
        f"mean {statistics.mean(sample):.0f}, p50 {sample[500]}, p90 {sample[900]}, p99 {sample[990]}, max {sample[-1]}"
    )
    with tempfile.TemporaryDirectory() as folder:
        save_llama(Path(folder), *SHAPE)
        AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(folder)
        chosen = (f"model.name={folder}", f"ray.enabled={asked.engine == 'actor'}".lower())
        config = configured("grpo_quickstart", *SIZES, *chosen, *asked.overrides)
        epochs = asked.epochs
        if not epochs:
            first = lockstep(config, lengths, 3, 1)
            epochs = max(1, round(first.collect / first.learn))
        print(f"{epochs} passes of the learner, train.max_policy_age={config.train.max_policy_age}")
        shares = []
        for _ in range(asked.repeats):
            apart = lockstep(config, lengths, asked.iterations, epochs)
            together = overlapped(config, lengths, asked.iterations, epochs)
            both = apart.collect + apart.learn
            ideal = apart.tokens_per_s * both / max(apart.collect, apart.learn)
            shares.append(together.tokens_per_s / ideal)
            print(
                f"  lockstep {apart.tokens_per_s:7.0f} tokens/s (engine {apart.collect:.2f} s + learner "
                f"{apart.learn:.2f} s)   overlapped {together.tokens_per_s:7.0f} (waits {together.collect:.2f} s, "
                f"learner {together.learn:.2f} s)   ideal {ideal:7.0f}   share {shares[-1]:.2f}",
                flush=True,
            )
    print(f"overlapped / ideal: {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
