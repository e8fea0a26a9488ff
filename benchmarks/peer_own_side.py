"""Our side of `peer_trl.py`: grpo.py's loop, an iteration whenever it is its turn.

python benchmarks/peer_own_side.py JOB DESCRIPTOR        (peer_trl.py starts it)
"""

import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from torch.profiler import profile  # noqa: E402

import grpo  # noqa: E402
from benchmarks.peer_work import BETAS, LEARNING_RATE, SEED, Job, Turns  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from config.schema import Config  # noqa: E402
from envs.group import Group  # noqa: E402
from run import engines  # noqa: E402
from run.build import build  # noqa: E402
from run.lockstep import Lockstep  # noqa: E402
from run.run import Run  # noqa: E402
from training import model_files  # noqa: E402
from training.batch import Batch  # noqa: E402

PROFILED_FROM = 2
"""Iterations before this one are left out of a profile."""


class InTurns(Lockstep):
    """grpo.py's loop, which begins an iteration when the other side has ended its own."""

    turns: Turns
    rounds: int
    profiled = False

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.said: dict[str, float] = {}

    def iterations(self) -> Iterator[int]:
        for iteration in range(1, self.rounds + 1):
            if not self.wait():
                return
            self.run.monitor.iteration = iteration
            yield iteration
        self.wait()

    def wait(self) -> bool:
        said, self.said = self.said, {}
        if torch.cuda.is_available():
            said["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return self.turns.wait(**said)

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        if self.profiled and self.run.monitor.iteration >= PROFILED_FROM:
            with profiled(stage):
                yield
        else:
            yield
        self.said[stage] = self.said.get(stage, 0.0) + time.perf_counter() - began

    def collect(self) -> list[Group]:
        with self.clock("collect"):
            groups = super().collect()
        completions = [one for group in groups for one in group.completions]
        self.said["tokens"] = sum(len(one.token_ids) for one in completions)
        self.said["prompt_tokens"] = sum(len(group.prompt) * len(group.completions) for group in groups)
        rewards = [one.verdict.score for one in completions if one.verdict is not None]
        self.said["reward"] = sum(rewards) / len(rewards)
        return groups

    def advantage(self, groups: Sequence[Group]) -> Batch:
        with self.clock("optimize"):
            return super().advantage(groups)

    def learn(self, minibatch: Batch) -> None:
        with self.clock("optimize"):
            super().learn(minibatch)

    def push_weights(self) -> None:
        with self.clock("push"):
            super().push_weights()
        self.said["weight check"] = self.run.monitor.extra.get("weight_check/seconds", 0.0)

    def done(self, iteration: int) -> None:
        """The ledger, but neither evaluation nor checkpoint, which TRL is not asked for either."""
        with self.clock("ledger"):
            self.run.monitor.consumed(iteration, list(self.run.groups.values()), [])


@contextmanager
def profiled(stage: str) -> Iterator[None]:
    """Prints which functions and which operations the block spends its time in; generation by its functions alone,
    whose operations are too many to sort in reasonable time."""
    functions = cProfile.Profile()
    with ExitStack() as watching:
        operations = None if stage == "collect" else watching.enter_context(profile(record_shapes=True))
        with functions:
            yield
    print(f"== {stage}: functions by their own time")
    pstats.Stats(functions, stream=sys.stdout).sort_stats("tottime").print_stats(16)
    if operations is not None:
        print(f"== {stage}: operations by their own time")
        averages = operations.key_averages(group_by_input_shape=True)
        print(averages.table(sort_by="self_cpu_time_total", row_limit=16, max_shapes_column_width=60))


def configured(job: Job) -> Config:
    """The quickstart's config with everything that the workload says instead."""
    work = job.work
    precision = {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    chosen = [
        "device=auto",
        "env.dataset=jsonl",
        "env.options={}",
        f"env.data_files={job.rows}",
        f"env.reward=benchmarks.peer_work:judged_{work.reward}",
        f"env.num_envs={work.prompts}",
        f"env.repeats={work.repeats}",
        "env.max_prompt_tokens=512",
        f"model.name={job.model}",
        f"model.dtype={work.dtype}",
        f"train.seed={SEED}",
        f"train.mixed_precision={precision}",
        f"train.total_dialog_turns={job.rounds * work.completions}",
        "train.checkpoint_frequency=0",
        f"train.gradient_accumulation_steps={work.completions // work.microbatch}",
        f"train_model.num_threads={job.threads}",
        f"inference_model.backend={job.engine}",
        f"inference_model.dtype={work.dtype}",
        f"inference_model.max_tokens={work.max_tokens}",
        "policy.kl_coef=0",
        f"optimizer.lr={LEARNING_RATE}",
        f"optimizer.betas=[{BETAS[0]},{BETAS[1]}]",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "logging.progress=false",
        "logging.sample_frequency=0",
        *job.options,
    ]
    register_schema()
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        return to_config(compose("grpo_quickstart", overrides=chosen))


def main() -> None:
    job, turns = Job.read(Path(sys.argv[1])), Turns(int(sys.argv[2]))
    if job.work.forced:  # vLLM refuses an end token that its model cannot draw
        engines.saved_eos_token_ids = lambda name, tokenizer: []  # type: ignore[attr-defined]
        model_files.check_files = lambda config, tokenizer, longest=0: None
    with tempfile.TemporaryDirectory() as folder:
        working = build(configured(job), Path(folder), InTurns)
        working.turns, working.rounds, working.profiled = turns, job.rounds, job.profile
        grpo.train(working)
        working.run.close("finished")


if __name__ == "__main__":
    main()
