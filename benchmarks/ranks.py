"""An optimizer step of two learner ranks beside one process with as many threads, and with one.

    python benchmarks/ranks.py [MODEL_FOLDER ...] [--rounds 5] [--prompts 8] [--repeats 8] [--prompt 32] [--limit 64]

Ranks are Ray actors with a thread each, as in a run (gloo, FSDP2). The same groups for all, their answers log-normal in
length (sigma 0.8); without a folder the quickstart's model and a random Llama of 43 million parameters. A step and
a push of each learner warm it up; then they take turns. Prints

- medians of the seconds of a step, and of a push into shared memory without an engine, and their ratios to those of the
  process with two threads;
- how far the ranks' gradient norm is from the one process's in the first step (relative).
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
from benchmarks.common import QUICKSTART, answer_length, arguments, machine, save_llama
from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.inference import InferenceModelConfig
from config.schema.models import ModelConfig, TrainModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig
from envs.group import Group, SampledCompletion, Sampling, Times, Verdict
from envs.task import Example
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.learner import Learner, make_learner
from torchgrpo.training.packed_sequence import real_tokens
from torchgrpo.training.process import prepare_process

RANKS = 2
ONE, TWO_THREADS = "1 process, 1 thread", f"1 process, {RANKS} threads"
SEVERAL = f"{RANKS} ranks, 1 thread each"
MIB = 2**20
PAUSE_S = 0.2
"""Between two measurements: threads of OpenMP go on spinning for a while."""


class Ways:
    """The learners of one model, by the names of what is measured, each with the threads of this process."""

    def __init__(self, model: str, asked: argparse.Namespace, folder: Path) -> None:
        one, several = (config_of(model, count, asked) for count in (1, RANKS))
        self.plan = make_plan(several, False, this_machine(folder), folder)
        prepare_process(one, 1, torch.device("cpu"))
        self.local = make_learner(one, make_plan(one, False, this_machine(folder), folder), folder)
        self.ranked = make_learner(several, self.plan, folder)
        self.by_name: dict[str, tuple[Learner, int]] = {
            ONE: (self.local, 1),
            TWO_THREADS: (self.local, RANKS),
            SEVERAL: (self.ranked, 1),
        }
        self.memory = SharedMemory()

    def step(self, name: str, batch: Batch) -> tuple[float, dict[str, float]]:
        learner, threads = self.by_name[name]
        torch.set_num_threads(threads)
        return timed(lambda: learner.step(batch).metrics)

    def push(self, name: str) -> float:
        learner, threads = self.by_name[name]
        torch.set_num_threads(threads)
        return timed(lambda: self.memory.write(Outgoing(learner.publish())))[0]

    def close(self) -> None:
        self.ranked.close()
        self.memory.close()


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    time.sleep(PAUSE_S)
    return common.timed(action)


def config_of(model: str, ranks: int, asked: argparse.Namespace) -> Config:
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=asked.prompts, repeats=asked.repeats),
        model=ModelConfig(name=model),
        train_model=TrainModelConfig(num_devices=ranks, num_threads=1),
        policy=PolicyConfig(kl_coef=0.0),
        optimizer=OptimizerConfig(lr=1e-5),
        inference_model=InferenceModelConfig(max_tokens=asked.limit, backend="transformers"),
        device="cpu",
    )
    config.derive()
    return config


def drawn(asked: argparse.Namespace, vocabulary: int) -> list[Group]:
    """Random tokens; prompts of half to the whole of the longest length, answers around a quarter of the limit."""
    chance = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=chance).tolist()

    def completion() -> SampledCompletion:
        length = answer_length(float(torch.randn((), generator=chance)), asked.limit)
        score = float(torch.rand((), generator=chance))
        verdict = Verdict(score, {}, "scored")
        return SampledCompletion(tokens(length), [-1.0] * length, [0] * length, "stop", verdict=verdict)

    def group(number: int) -> Group:
        length = int(torch.randint(asked.prompt // 2, asked.prompt + 1, (), generator=chance))
        example = Example(({"role": "user", "content": ""},), "", number)
        completions = [completion() for _ in range(asked.repeats)]
        return Group(
            number, example, tuple(tokens(length)), "", Sampling(), completions, Times(0.0, 0.0, 0.0)
        )

    return [group(number) for number in range(asked.prompts)]


def measure(model: str, asked: argparse.Namespace, folder: Path) -> None:
    ways = Ways(model, asked, folder)
    try:
        groups = drawn(asked, AutoConfig.from_pretrained(model).vocab_size)
        batch = ways.local.credit(Rollout.of(groups)).batch
        batch.sample_log_prob = ways.local.worker.log_prob([batch])[0]
        norms = [ways.step(name, batch)[1]["grad_norm"] for name in (ONE, SEVERAL)]
        for name in ways.by_name:
            ways.push(name)
        rounds = [
            {name: (ways.step(name, batch)[0], ways.push(name)) for name in ways.by_name}
            for _ in range(asked.rounds)
        ]
        print_seconds(ways, batch, rounds)
        print(f"gradient norm of the first step: {norms[1] / norms[0] - 1:+.1e} from that of one process")
    finally:
        ways.close()


def print_seconds(ways: Ways, batch: Batch, rounds: list[dict[str, tuple[float, float]]]) -> None:
    assert ways.plan.shape is not None
    millions, tokens = ways.plan.shape.parameters / 1e6, real_tokens(batch.tokens)
    print(
        f"{ways.plan.config.model.name}: {millions:.1f} M parameters, {len(batch)} completions, {tokens} tokens"
    )
    print(f"{'':24}{'step s':>9}{'fastest':>9}{'ratio':>7}{'push s':>9}{'ratio':>7}")
    middle = {
        name: [statistics.median(each[name][kind] for each in rounds) for kind in (0, 1)]
        for name in ways.by_name
    }
    for name, (step, push) in middle.items():
        fastest = min(each[name][0] for each in rounds)
        ratios = [value / of_one for value, of_one in zip((step, push), middle[TWO_THREADS], strict=True)]
        print(f"{name:24}{step:9.3f}{fastest:9.3f}{ratios[0]:7.2f}{push:9.3f}{ratios[1]:7.2f}", flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=5, prompts=8, repeats=8, prompt=32, limit=64)
    parser.add_argument("models", nargs="*")
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        models = asked.models or [
            str(QUICKSTART),
            save_llama(Path(folder) / "llama", 16384, 512, 1376, 12, 8, 4),
        ]
        for model in models:
            measure(model, asked, Path(folder))


if __name__ == "__main__":
    main()
