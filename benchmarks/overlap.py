"""Compares token rates of lockstep and overlapped training with the rate of perfect overlap.

    python benchmarks/overlap.py [--engine thread|actor] [--iterations 12] [--sigma 1.0] [key=value ...]

In both schedules the engine has one core and the learner another; the engine is a thread of this process, or a
Ray actor. Answers have forced lengths, log-normal over groups and the same for both schedules. The number of
passes over a batch (`--epochs`) makes the learner's stage as long as the engine's; `--epochs 0` chooses the
best balance.

Lockstep takes the sum of its two stages. The ideal time is the longer of the two stages. The lockstep engine
also waits for the longest answer of each batch, which the overlapped engine does not; the share of the ideal
may therefore exceed 1. The benchmark asserts the age of every token that is trained on.
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

from benchmarks.common import QUICKSTART, compose_config, describe_machine, make_parser, save_llama
from config.schema.config import Config
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.run.build_run import build_run
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun, Schedule, ScheduleType

ENGINE_CORE, LEARNER_CORE = 0, 1
SHAPE = (4096, 192, 768, 4, 6, 6)
"""Shape of the model: large enough that arithmetic dominates Python. The end token is rarely sampled among 4096
tokens."""
LONGEST, MEDIAN = 192, 32
WARM_UP = 2
SIZES = (
    "env.num_envs=16",
    "env.repeats=4",
    "env.oversample=8",  # the engine generates twice the completions of training, which balances the two stages
    f"inference_model.max_tokens={LONGEST}",
    "policy.kl_coef=0",
    "train.max_policy_age=2",
    "train.stale_groups=wait",  # `drop` would train on shorter answers, which is less work
    "train.total_dialog_turns=1000000",
    "train_model.num_threads=1",
    "optimizer.lr=1e-5",
)


@dataclass(frozen=True)
class StageTimes:
    """Mean seconds of an iteration's stages, and response tokens per second."""

    collect: float
    learn: float
    tokens_per_s: float


class ForcedLengths:
    """Forced answer lengths by group number, equal for both schedules."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma

    def group_length(self, group_id: int) -> int:
        length = MEDIAN * math.exp(self.sigma * random.Random(group_id).gauss(0.0, 1.0))
        return max(1, min(LONGEST, round(length)))

    def apply_to(self, group_rollout: GroupRollout) -> None:
        """Replaces the rollout's `make_request` by one that limits the length."""
        make_request = group_rollout.make_request

        def make_forced_request(prompt: tuple[int, ...], group_id: int) -> Request:
            request = make_request(prompt, group_id)
            return replace(request, sampling=replace(request.sampling, max_tokens=self.group_length(group_id)))

        group_rollout.make_request = make_forced_request  # type: ignore[method-assign]


def engine_actor_pid() -> int:
    """Returns the process id of the engine's Ray actor."""
    return next(child.pid for child in psutil.Process().children(recursive=True) if "EngineActor" in child.name())


@contextmanager
def pinned_run(config: Config, lengths: ForcedLengths, schedule: type[ScheduleType]) -> Iterator[ScheduleType]:
    """Builds a run with forced lengths, and pins engine and learner to one core each."""
    with tempfile.TemporaryDirectory() as run_dir:
        run = build_run(config, Path(run_dir), schedule)
        lengths.apply_to(run.rollout_components.group_rollout)
        if not run.plan.devices.in_process:
            for task in Path(f"/proc/{engine_actor_pid()}/task").iterdir():
                os.sched_setaffinity(int(task.name), {ENGINE_CORE})
        os.sched_setaffinity(0, {LEARNER_CORE})
        try:
            run.push_weights()
            yield run
        finally:
            run.close("finished")


def train_on(run: Schedule, rollout: Rollout, epochs: int) -> int:
    """Trains on a rollout and returns its number of response tokens."""
    run.advantage(rollout)
    for _ in range(epochs):
        run.learn(rollout)
    return int(rollout.batch.tokens.response_mask.sum())


def measure_lockstep(config: Config, lengths: ForcedLengths, iterations: int, epochs: int) -> StageTimes:
    with pinned_run(config, lengths, LockstepRun) as run:
        collects, learns, tokens = [], [], 0
        for index in range(iterations + WARM_UP):
            start = time.perf_counter()
            rollout = run.collect()
            middle = time.perf_counter()
            count = train_on(run, rollout, epochs)
            run.push_weights()
            if index >= WARM_UP:
                collects.append(middle - start)
                learns.append(time.perf_counter() - middle)
                tokens += count
    total = sum(collects) + sum(learns)
    return StageTimes(statistics.mean(collects), statistics.mean(learns), tokens / total)


def measure_overlapped(config: Config, lengths: ForcedLengths, iterations: int, epochs: int) -> StageTimes:
    with pinned_run(config, lengths, OverlappedRun) as run, run.generation():
        if run.plan.devices.in_process:
            run.rollout_components.loop.call(lambda: os.sched_setaffinity(0, {ENGINE_CORE}))
        waits, learns, tokens = [], [], 0
        for index in range(iterations + WARM_UP):
            start = time.perf_counter()
            rollout = run.take_batch()
            middle = time.perf_counter()
            batch = rollout.batch
            assert batch.age is not None
            ages = batch.age[batch.tokens.loss_mask]
            assert int(ages.max()) <= config.train.max_policy_age, "a token is too old"
            count = train_on(run, rollout, epochs)
            run.push_weights()
            if index >= WARM_UP:
                waits.append(middle - start)
                learns.append(time.perf_counter() - middle)
                tokens += count
    return StageTimes(statistics.mean(waits), statistics.mean(learns), tokens / (sum(waits) + sum(learns)))


def main() -> None:
    parser = make_parser(__doc__, iterations=12, repeats=2, epochs=0)
    parser.add_argument("--engine", choices=("thread", "actor"), default="actor")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a length")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = ForcedLengths(options.sigma)
    sample = sorted(lengths.group_length(group) for group in range(1000))
    print(
        f"{describe_machine()}\nengine: {options.engine}; lengths log-normal, sigma {options.sigma}: "
        f"mean {statistics.mean(sample):.0f}, p50 {sample[500]}, p90 {sample[900]}, p99 {sample[990]}, max {sample[-1]}"
    )
    with tempfile.TemporaryDirectory() as folder:
        save_llama(Path(folder), *SHAPE)
        AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(folder)
        overrides = (f"model.name={folder}", f"ray.enabled={options.engine == 'actor'}".lower())
        config = compose_config("grpo_quickstart", *SIZES, *overrides, *options.overrides)
        epochs = options.epochs
        if not epochs:
            first = measure_lockstep(config, lengths, 3, 1)
            epochs = max(1, round(first.collect / first.learn))
        print(f"{epochs} passes of the learner, train.max_policy_age={config.train.max_policy_age}")
        shares = []
        for _ in range(options.repeats):
            in_turn = measure_lockstep(config, lengths, options.iterations, epochs)
            overlapping = measure_overlapped(config, lengths, options.iterations, epochs)
            both_stages = in_turn.collect + in_turn.learn
            ideal = in_turn.tokens_per_s * both_stages / max(in_turn.collect, in_turn.learn)
            shares.append(overlapping.tokens_per_s / ideal)
            print(
                f"  lockstep {in_turn.tokens_per_s:7.0f} tokens/s (engine {in_turn.collect:.2f} s + learner "
                f"{in_turn.learn:.2f} s)   overlapped {overlapping.tokens_per_s:7.0f} "
                f"(waits {overlapping.collect:.2f} s, learner {overlapping.learn:.2f} s)   "
                f"ideal {ideal:7.0f}   share {shares[-1]:.2f}",
                flush=True,
            )
    print(f"overlapped / ideal: {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
