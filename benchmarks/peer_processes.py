"""Defines workloads of `peer_trl.py`, and runs one side, grpo.py or TRL, turn by turn.

    python benchmarks/peer_processes.py JOB DESCRIPTOR        (started by peer_trl.py)

The module also defines the rewards. TRL's side runs in an environment without this project's
packages, so each side imports its packages in its own function.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Workload:
    """The work of one iteration, equal for both sides.

    prompts, repeats: groups of an iteration, completions of a group. max_tokens: maximum length of a
    completion.
    forced_length: no token ends a completion, so that all have the maximum length. dtype: of weights and
    arithmetic.
    model: `quickstart`, or `given` (by `--model`). data: `sums`, `stories` or `gsm8k`. reward: a function of
    this file.
    microbatch: completions of a microbatch, on both sides.
    """

    name: str
    model: str
    prompts: int
    repeats: int
    max_tokens: int
    forced_length: bool
    dtype: str
    data: str
    reward: str
    microbatch: int

    @property
    def completions(self) -> int:
        """Number of completions in an iteration, which is one optimizer step."""
        return self.prompts * self.repeats


W1 = Workload("w1", "quickstart", 16, 8, 32, True, "float32", "sums", "share_of_even", 128)
W2 = Workload("w2", "given", 4, 4, 48, True, "float32", "stories", "share_of_even", 16)
W3 = Workload("w3-right", "given", 4, 8, 192, False, "float32", "gsm8k", "right_number", 8)
WORKLOADS = {
    work.name: work
    for work in (
        W1,
        W2,
        replace(W2, name="w2-bf16", dtype="bfloat16"),
        W3,
        replace(W3, name="w3-dense", reward="share_of_even"),
        replace(W3, name="w3-dense-bf16", reward="share_of_even", dtype="bfloat16"),
    )
}
"""Workloads by name.

`w3-right` scores completions as a run does: a small model gets nearly all groups wrong, and a trainer may skip
groups without a gradient. `w3-dense` has another reward, which differs among all completions of a group.
"""

LEARNING_RATE, BETAS, SEED = 1e-6, (0.9, 0.95), 0


@dataclass(frozen=True)
class Job:
    """The job of a side: a workload, and the settings of the side.

    model: a folder in Hugging Face format. rows: a JSONL file of "messages" and "answer". For TRL the rows are
    in the order of training; for our side they are a data set, which SEED shuffles into the same order. rounds:
    iterations.
    engine: our engine, or `trl`. options: fields of TRL's `GRPOConfig`, or overrides of our config.
    """

    work: Workload
    model: str
    rows: str
    rounds: int
    threads: int
    engine: str
    options: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Job":
        fields = json.loads(path.read_text())
        return cls(**fields | {"work": Workload(**fields["work"]), "options": tuple(fields["options"])})


class TurnPipe:
    """A side's pipes to `peer_trl.py`; the side works only between two waits.

    Args:
        descriptor: file descriptor for reports, which are JSON lines. A line of standard input starts an
        iteration.
    """

    def __init__(self, descriptor: int) -> None:
        self.report_stream = os.fdopen(descriptor, "w")
        self.report: dict[str, float] = defaultdict(float)
        self.cpu_start = time.process_time()

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        cpu_start = time.perf_counter()
        yield
        self.report[stage] += time.perf_counter() - cpu_start

    def wait(self) -> bool:
        """Sends the report since the last wait, and sleeps until the next turn.

        Returns False after the last turn.
        """
        import torch

        self.report["cpu"] = time.process_time() - self.cpu_start
        if torch.cuda.is_available():
            self.report["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.report_stream.write(json.dumps(self.report) + "\n")
        self.report_stream.flush()
        self.report.clear()
        has_turn = bool(sys.stdin.readline())
        self.cpu_start = time.process_time()
        return has_turn


def right_number(completion: Any, example: Any) -> float:
    """Returns 1.0 where the last number of a completion is the answer, else 0.0."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion.text)
    answer = example.answer.replace(",", "")
    return float(bool(numbers) and numbers[-1].replace(",", "").removesuffix(".0") == answer)


def share_of_even(completion: Any, example: Any) -> float:
    """Returns the share of characters with an even code.

    This reward differs among the completions of any model.
    """
    return sum(ord(character) % 2 == 0 for character in completion.text) / max(len(completion.text), 1)


def run_own_side(job: Job, turns: TurnPipe) -> None:
    """Runs grpo.py's loop, starting each iteration at this side's turn."""
    sys.path.insert(0, str(ROOT))
    import grpo
    from benchmarks.common import compose_config
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.rollout.engines.backends import transformers, vllm
    from torchgrpo.run.build_run import build_run
    from torchgrpo.run.lockstep_run import LockstepRun
    from torchgrpo.training import model_files

    class TurnedRun(LockstepRun):
        def iterations(self) -> Iterator[int]:
            for iteration in range(1, job.rounds + 1):
                if not turns.wait():
                    return
                self.monitor.iteration = iteration
                yield iteration
            turns.wait()

        def collect(self) -> Rollout:
            with turns.clock("generate and score"):
                rollout = super().collect()
            groups = rollout.groups
            completions = [completion for group in groups for completion in group.completions]
            turns.report["tokens"] = sum(len(completion.token_ids) for completion in completions)
            turns.report["prompt_tokens"] = sum(len(group.prompt) * len(group.completions) for group in groups)
            rewards = [one.verdict.score for one in completions if one.verdict is not None]
            turns.report["reward"] = sum(rewards) / len(rewards)
            return rollout

        def advantage(self, rollout: Rollout) -> None:
            with turns.clock("optimize"):
                super().advantage(rollout)

        def learn(self, minibatch: Rollout) -> None:
            with turns.clock("optimize"):
                super().learn(minibatch)

        def end_iteration(self, iteration: int, rollout: Rollout) -> None:
            """Writes the ledger, but runs no evaluation and writes no checkpoint, as on TRL's side."""
            self.monitor.finish_iteration(iteration, rollout.groups, [])

    if job.work.forced_length:  # vLLM rejects an end token that its model cannot sample
        for backend in (transformers, vllm):
            backend.saved_eos_token_ids = lambda name, tokenizer: []  # type: ignore[attr-defined]
        model_files.check_model_files = lambda config, tokenizer, longest=0: None
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(compose_config("grpo_quickstart", *own_overrides(job)), Path(folder), TurnedRun)
        grpo.train(run)
        run.close("finished")


def own_overrides(job: Job) -> list[str]:
    """Returns the overrides of the quickstart's config for the workload."""
    work = job.work
    precision = {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    return [
        *("device=auto", "env.dataset=jsonl", "env.options={}", f"env.data_files={job.rows}"),
        *(f"env.num_envs={work.prompts}", f"env.repeats={work.repeats}", "env.max_prompt_tokens=512"),
        *(f"env.reward=benchmarks.peer_processes:{work.reward}", f"train.seed={SEED}"),
        *(f"model.name={job.model}", f"model.dtype={work.dtype}", f"train.mixed_precision={precision}"),
        f"train.total_dialog_turns={job.rounds * work.completions}",
        f"train.gradient_accumulation_steps={work.completions // work.microbatch}",
        *(f"train_model.num_threads={job.threads}", f"inference_model.backend={job.engine}"),
        *(f"inference_model.dtype={work.dtype}", f"inference_model.max_tokens={work.max_tokens}"),
        *("policy.kl_coef=0", f"optimizer.lr={LEARNING_RATE}", f"optimizer.betas=[{BETAS[0]},{BETAS[1]}]"),
        *("optimizer.schedule=constant", "optimizer.warmup_steps=0", *job.options),
    ]


def run_trl_side(job: Job, turns: TurnPipe) -> None:
    """Runs TRL's GRPOTrainer, starting each iteration at this side's turn."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    class TimedTrainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate(self, prompts: list[Any]) -> Any:
            with turns.clock("generate"):
                generated = super()._generate(prompts)
            prompt_ids, completion_ids, *_ = generated
            turns.report["tokens"] += sum(map(len, completion_ids))
            turns.report["prompt_tokens"] += sum(map(len, prompt_ids))
            return generated

        def _calculate_rewards(self, *args: Any) -> Any:
            with turns.clock("score"):
                rewards = super()._calculate_rewards(*args)
            turns.report["reward"] = float(rewards.mean())
            return rewards

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with turns.clock("step"):
                return super().training_step(*args, **kwargs)

    class TurnCallback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not turns.wait():
                raise SystemExit

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            turns.wait()

    torch.set_num_threads(job.threads)
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])
    scorer = {"right_number": right_number, "share_of_even": share_of_even}[job.work.reward]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [SimpleNamespace(text=messages[0]["content"]) for messages in completions]
        references = [SimpleNamespace(answer=reference) for reference in answer]
        return [scorer(*pair) for pair in zip(texts, references, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(output_dir=folder, **trl_settings(job, torch.cuda.is_available()))
        TimedTrainer(job.model, reward, args=settings, train_dataset=data, callbacks=[TurnCallback()]).train()


def trl_settings(job: Job, gpu: bool) -> dict[str, Any]:
    """Returns the arguments of TRL's `GRPOConfig` for the workload.

    TRL generates once per optimizer step, without KL, checkpoints and logging; see peer_trl.py for the reasons.
    """
    work = job.work
    sizes = {
        "per_device_train_batch_size": work.microbatch,
        "gradient_accumulation_steps": work.completions // work.microbatch,
        "num_generations": work.repeats,
        "max_completion_length": work.max_tokens,
        "max_steps": job.rounds,
        "model_init_kwargs": {"dtype": work.dtype},
        "bf16": work.dtype == "bfloat16",
    }
    adam = {"learning_rate": LEARNING_RATE, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1]}
    plain = {"beta": 0.0, "num_iterations": 1, "lr_scheduler_type": "constant", "gradient_checkpointing": False}
    order = {"shuffle_dataset": False, "seed": SEED, "use_cpu": not gpu, "dataloader_pin_memory": gpu}
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    settings: dict[str, Any] = {**sizes, **adam, **plain, **order, **quiet}
    for option in job.options:
        name, _, value = option.partition("=")
        settings[name] = json.loads(value)
    return settings


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    job = Job.read(Path(sys.argv[1]))
    (run_trl_side if job.engine == "trl" else run_own_side)(job, TurnPipe(int(sys.argv[2])))
