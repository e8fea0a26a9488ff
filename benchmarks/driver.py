"""The driver's own seconds in a lockstep iteration: everything but the engine and the model.

    python benchmarks/driver.py [--completions 1000 10000 100000] [--repeats 8] [--tokens 32] [key=value ...]

The quickstart's run as `run.build` makes it, with an engine whose completions are there at once and a learner that has
no model: prompts, groups, verdicts, tensors, advantages, shares, metrics and the ledger are real. Prints, for each
number of completions in an iteration, the median of its seconds without the engine's and the model's, microseconds a
completion, and how they divide: each stage without those inside it.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

import grpo  # noqa: E402
import run.engines  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from config.schema import Config  # noqa: E402
from envs.chat import Encoder  # noqa: E402
from envs.group import SampledCompletion  # noqa: E402
from envs.judging.service import RewardService  # noqa: E402
from monitoring.monitor import Monitor  # noqa: E402
from rollout.collect import Collector  # noqa: E402
from rollout.engines.sampler import Request, Response  # noqa: E402
from rollout.weights.push import Weights  # noqa: E402
from run.build import build  # noqa: E402
from run.lockstep import Lockstep  # noqa: E402
from run.run import Run  # noqa: E402
from training import split_learner  # noqa: E402
from training.split_learner import SplitLearner  # noqa: E402
from training.worker import Part, Piece, TokenScores, Update, Worker  # noqa: E402

STEPPED = 64
"""Groups that the engine returns at a time."""
STAGES: dict[str, tuple[Any, str]] = {
    "groups: prompts and coroutines": (Collector, "collect"),
    "groups: chat to tokens": (Encoder, "encode"),
    "groups: tokens to text": (Encoder, "decode"),
    "groups: prompt to text": (Encoder, "prompt_text"),
    "verdicts": (RewardService, "submit"),
    "collate": (split_learner, "collate"),
    "credit": (SplitLearner, "credit"),
    "minibatches": (Run, "minibatches"),
    "step: shares and totals": (SplitLearner, "step"),
    "step: log-ratios to rows": (split_learner, "_of_batch"),
    "metrics": (Monitor, "optimized"),
    "what the ledger needs": (Monitor, "learned"),
    "ledger": (Monitor, "consumed"),
}


class Clock:
    """Seconds in each stage without those inside it. idle: those of the simulation, "engine" and "model"."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self._inside: list[float] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(*given: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                took = time.perf_counter() - began
                self.taken[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return run_timed

    def watch(self, stack: ExitStack) -> None:
        for name, (owner, attribute) in STAGES.items():
            stack.enter_context(patch.object(owner, attribute, self.timed(name, getattr(owner, attribute))))


class Engine:
    """Returns what was asked for at the next step."""

    def __init__(self, ids: Sequence[int], tokens: int) -> None:
        self.policy_version = 0
        self.ids = ids
        self.tokens = tokens
        self.chance = random.Random(0)
        self.waiting: deque[Request] = deque()

    @property
    def in_flight(self) -> int:
        return len(self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self, timeout: float) -> list[Response]:
        taken = [self.waiting.popleft() for _ in range(min(STEPPED, len(self.waiting)))]
        return [Response(one.request_id, [self._completion() for _ in range(one.n)]) for one in taken]

    def _completion(self) -> SampledCompletion:
        count = self.chance.randint(self.tokens // 2, self.tokens)
        ids = self.chance.choices(self.ids, k=count)
        return SampledCompletion(ids, [-1.0] * count, [self.policy_version] * count, "stop")

    def close(self) -> None:
        pass


def model_gradients(worker: Worker, pieces: Sequence[Piece]) -> Part:
    """Those of no model."""
    tokens = []
    for piece in pieces:
        assert piece.batch.mask is not None
        zeros = torch.zeros(int(piece.batch.mask.sum()))
        tokens.append(TokenScores(zeros, zeros))
    return Part(1, {"loss/objective": torch.zeros(1, dtype=torch.float64)}, tokens)


def model_update(worker: Worker) -> Update:
    return Update(0.0, 1.0, True, False)


def push(weights: Weights) -> None:
    weights.version += 1


class Timed(Lockstep):
    """Some iterations, each timed."""

    iterations_left = 0
    clock: Clock

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seconds: list[Counter[str]] = []

    def iterations(self) -> Iterator[int]:
        for iteration in range(1, self.iterations_left + 1):
            self.clock.taken.clear()
            began = time.perf_counter()
            yield iteration
            taken = Counter(self.clock.taken)
            taken["rest"] = time.perf_counter() - began - sum(taken.values())
            self.seconds.append(taken)

    def done(self, iteration: int) -> None:
        self.run.monitor.consumed(iteration, list(self.run.groups.values()), [])


def measure(asked: argparse.Namespace, config: Config, clock: Clock) -> dict[str, float]:
    """Medians of the seconds of every stage."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def engine(config: Config, tokenizer: PreTrainedTokenizerBase, *given: Any) -> Engine:
            made = Engine(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)), asked.tokens)
            made.step = clock.timed("engine", made.step)  # type: ignore[method-assign]
            return made

        stack.enter_context(patch.object(run.engines, "build_engine", engine))
        stack.enter_context(patch.object(Weights, "push", push))
        stack.enter_context(patch.object(Worker, "gradients", clock.timed("model", model_gradients)))
        stack.enter_context(patch.object(Worker, "update", model_update))
        clock.watch(stack)
        working = build(config, Path(folder), Timed)
        working.clock, working.iterations_left = clock, asked.iterations + 1
        try:
            grpo.train(working)
        finally:
            working.run.close("finished")
    measured = working.seconds[1:]
    names = {name for each in measured for name in each}
    return {name: statistics.median(each[name] for each in measured) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--completions", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=3)
    asked, overrides = parser.parse_known_args()
    register_schema()
    columns = {}
    for completions in asked.completions:
        own = [
            f"env.num_envs={completions // asked.repeats}",
            f"env.repeats={asked.repeats}",
            f"inference_model.max_tokens={asked.tokens}",
            f"train.gradient_accumulation_steps={max(1, completions // 1000)}",
            "policy.kl_coef=0",
            "logging.progress=false",
            "logging.sample_frequency=0",
            "train.total_dialog_turns=100000000",
        ]
        with initialize_config_dir(str(ROOT / "config"), version_base=None):
            config = to_config(compose("grpo_quickstart", overrides=[*own, *overrides]))
        columns[completions] = measure(asked, config, Clock())
    report(columns)


def report(columns: dict[int, dict[str, float]]) -> None:
    counts = list(columns)
    print(f"{'completions':34}" + "".join(f"{count:>18,}" for count in counts))
    own = [name for name in (*STAGES, "rest") if any(name in column for column in columns.values())]
    for name in own:
        cells = [(columns[count].get(name, 0.0), count) for count in counts]
        print(f"{name:34}" + "".join(f"{s:9.3f} s{s / n * 1e6:5.1f} us" for s, n in cells))
    whole = [(sum(columns[count].get(name, 0.0) for name in own), count) for count in counts]
    print(f"{'all of the driver':34}" + "".join(f"{s:9.3f} s{s / n * 1e6:5.1f} us" for s, n in whole))


if __name__ == "__main__":
    main()
