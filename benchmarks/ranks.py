"""Times optimizer steps and weight pushes of two learner ranks against a single process.

    python benchmarks/ranks.py [MODEL_FOLDER ...] [--rounds 5] [--prompts 8] [--repeats 8] [--prompt 32]
    [--limit 64]

Ranks are Ray actors with one thread each, as in a run (gloo, FSDP2). All learners train on the same groups,
with answers of log-normal length (sigma 0.8). Without a folder, the models are the quickstart's model and a
random Llama of 43 million parameters. One step and one push of each learner are a warm-up; then the learners
take turns. Prints

- the median seconds of a step, and of a push into shared memory without an engine, and their ratios to those
  of the process with two threads;
- the relative difference of the gradient norm in the first step between the ranks and the single process.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig

from benchmarks import common
from benchmarks.common import QUICKSTART, answer_length, describe_machine, make_parser, save_llama
from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.inference import InferenceModelConfig
from config.schema.models import ModelConfig, TrainModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig
from envs.group import Group, GroupTimes, SampledCompletion, Sampling, Verdict
from envs.task import Example
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.training.learner import Learner, make_learner
from torchgrpo.training.packed_sequence import count_real_tokens
from torchgrpo.training.process_setup import prepare_process

RANKS = 2
ONE_THREAD, TWO_THREADS = "1 process, 1 thread", f"1 process, {RANKS} threads"
SEVERAL_RANKS = f"{RANKS} ranks, 1 thread each"
MIB = 2**20
PAUSE_S = 0.2
"""Pause before each measurement, since idle OpenMP threads spin for some time."""


class LearnerVariants:
    """The learners of one model and their thread counts, by variant name."""

    def __init__(self, model: str, options: argparse.Namespace, folder: Path) -> None:
        local_config, ranks_config = (make_config(model, count, options) for count in (1, RANKS))
        self.plan = make_plan(ranks_config, False, this_machine(folder), folder)
        prepare_process(local_config, 1, torch.device("cpu"))
        local_plan = make_plan(local_config, False, this_machine(folder), folder)
        self.local_learner = make_learner(local_config, local_plan, folder)
        self.rank_learner = make_learner(ranks_config, self.plan, folder)
        self.by_name: dict[str, tuple[Learner, int]] = {
            ONE_THREAD: (self.local_learner, 1),
            TWO_THREADS: (self.local_learner, RANKS),
            SEVERAL_RANKS: (self.rank_learner, 1),
        }
        self.memory = SharedMemory()

    def step(self, name: str, batch: Batch) -> tuple[float, dict[str, float]]:
        learner, threads = self.by_name[name]
        torch.set_num_threads(threads)
        return time_after_pause(lambda: learner.step(batch).metrics)

    def push(self, name: str) -> float:
        learner, threads = self.by_name[name]
        torch.set_num_threads(threads)
        return time_after_pause(lambda: self.memory.write(WeightUpdate(learner.publish())))[0]

    def close(self) -> None:
        self.rank_learner.close()
        self.memory.close()


def time_after_pause(action: Callable[[], Any]) -> tuple[float, Any]:
    time.sleep(PAUSE_S)
    return common.time_call(action)


def make_config(model: str, ranks: int, options: argparse.Namespace) -> Config:
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=options.prompts, repeats=options.repeats),
        model=ModelConfig(name=model),
        train_model=TrainModelConfig(num_devices=ranks, num_threads=1),
        policy=PolicyConfig(kl_coef=0.0),
        optimizer=OptimizerConfig(lr=1e-5),
        inference_model=InferenceModelConfig(max_tokens=options.limit, backend="transformers"),
        device="cpu",
    )
    config.derive_fields()
    return config


def sample_groups(options: argparse.Namespace, vocabulary: int) -> list[Group]:
    """Returns groups of random tokens.

    Prompt lengths are uniform from half of `--prompt` to all of it; answers have about a quarter of `--limit`.
    """
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    def completion() -> SampledCompletion:
        length = answer_length(float(torch.randn((), generator=generator)), options.limit)
        score = float(torch.rand((), generator=generator))
        verdict = Verdict(score, {}, "scored")
        return SampledCompletion(tokens(length), [-1.0] * length, [0] * length, "stop", verdict=verdict)

    def group(number: int) -> Group:
        length = int(torch.randint(options.prompt // 2, options.prompt + 1, (), generator=generator))
        example = Example(({"role": "user", "content": ""},), "", number)
        completions = [completion() for _ in range(options.repeats)]
        return Group(number, example, tuple(tokens(length)), "", Sampling(), completions, GroupTimes(0.0, 0.0, 0.0))

    return [group(number) for number in range(options.prompts)]


def measure(model: str, options: argparse.Namespace, folder: Path) -> None:
    variants = LearnerVariants(model, options, folder)
    try:
        groups = sample_groups(options, AutoConfig.from_pretrained(model).vocab_size)
        batch = variants.local_learner.credit(Rollout.from_groups(groups)).batch
        batch.sample_log_prob = variants.local_learner.worker.log_prob([batch])[0]
        norms = [variants.step(name, batch)[1]["grad_norm"] for name in (ONE_THREAD, SEVERAL_RANKS)]
        for name in variants.by_name:
            variants.push(name)
        rounds = [
            {name: (variants.step(name, batch)[0], variants.push(name)) for name in variants.by_name}
            for _ in range(options.rounds)
        ]
        print_seconds(variants, batch, rounds)
        print(f"gradient norm of the first step: {norms[1] / norms[0] - 1:+.1e} from that of one process")
    finally:
        variants.close()


def print_seconds(variants: LearnerVariants, batch: Batch, rounds: list[dict[str, tuple[float, float]]]) -> None:
    assert variants.plan.shape is not None
    millions, tokens = variants.plan.shape.parameters / 1e6, count_real_tokens(batch.tokens)
    print(f"{variants.plan.config.model.name}: {millions:.1f} M parameters, {len(batch)} completions, {tokens} tokens")
    print(f"{'':24}{'step s':>9}{'fastest':>9}{'ratio':>7}{'push s':>9}{'ratio':>7}")
    medians = {
        name: [statistics.median(each[name][kind] for each in rounds) for kind in (0, 1)] for name in variants.by_name
    }
    for name, (step, push) in medians.items():
        fastest = min(each[name][0] for each in rounds)
        ratios = [value / base for value, base in zip((step, push), medians[TWO_THREADS], strict=True)]
        print(f"{name:24}{step:9.3f}{fastest:9.3f}{ratios[0]:7.2f}{push:9.3f}{ratios[1]:7.2f}", flush=True)


def main() -> None:
    parser = make_parser(__doc__, rounds=5, prompts=8, repeats=8, prompt=32, limit=64)
    parser.add_argument("models", nargs="*")
    options = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or [str(QUICKSTART), save_llama(Path(folder) / "llama", 16384, 512, 1376, 12, 8, 4)]
        for model in models:
            measure(model, options, Path(folder))


if __name__ == "__main__":
    main()
