"""Both sides of `peer_trl.py`: workloads, rewards, and an iteration of grpo.py or GRPOTrainer whenever it is its turn.

python benchmarks/peer_sides.py JOB DESCRIPTOR        (peer_trl.py starts it)

TRL's side runs in an environment without this project's packages, so each side imports its own.
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
    """What one iteration of either side is.

    prompts, repeats: groups of an iteration, completions of a group. max_tokens: of a completion.
    forced: no token ends a completion, so that all are as long as they may be. dtype: of weights and arithmetic.
    model: `quickstart`, or `given` (by `--model`). data: `sums`, `stories` or `gsm8k`. reward: a function of this file.
    microbatch: completions of a microbatch, on both sides.
    """

    name: str
    model: str
    prompts: int
    repeats: int
    max_tokens: int
    forced: bool
    dtype: str
    data: str
    reward: str
    microbatch: int

    @property
    def completions(self) -> int:
        """Of one iteration, which is one optimizer step."""
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
"""`w3-right` judges as a run does; a small model gets nearly every group all wrong, and a trainer may spare itself what
has no gradient. `w3-dense` differs in the reward alone, which no two completions of a group share."""

LEARNING_RATE, BETAS, SEED = 1e-6, (0.9, 0.95), 0


@dataclass(frozen=True)
class Job:
    """An order to a side: a workload, and where and how it runs.

    model: a folder in Hugging Face format. rows: JSONL of "messages" and "answer", in the order of training for TRL and
    as a data set for ours, whose order with SEED is that one. rounds: iterations. engine: of ours, or `trl`.
    options: fields of TRL's `GRPOConfig`, or overrides of ours.
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


class Turns:
    """A side's end of the pipes to `peer_trl.py`: it works only between two waits.

    Args:
        descriptor: file descriptor that JSON lines go to; a line of standard input is the leave to go on.
    """

    def __init__(self, descriptor: int) -> None:
        self.told = os.fdopen(descriptor, "w")
        self.said: dict[str, float] = defaultdict(float)
        self.began = time.process_time()

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.said[stage] += time.perf_counter() - began

    def wait(self) -> bool:
        """Tells what was said since the last wait, with CPU seconds, and sleeps until its turn; False: no more."""
        import torch

        self.said["cpu"] = time.process_time() - self.began
        if torch.cuda.is_available():
            self.said["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.told.write(json.dumps(self.said) + "\n")
        self.told.flush()
        self.said.clear()
        go_on = bool(sys.stdin.readline())
        self.began = time.process_time()
        return go_on


def right_number(completion: Any, example: Any) -> float:
    """1.0 where the last number of a completion is the answer, else 0.0."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion.text)
    answer = example.answer.replace(",", "")
    return float(bool(found) and found[-1].replace(",", "").removesuffix(".0") == answer)


def share_of_even(completion: Any, example: Any) -> float:
    """Share of the characters with an even code: it differs among completions, whatever a model writes."""
    return sum(ord(character) % 2 == 0 for character in completion.text) / max(len(completion.text), 1)


def own_side(job: Job, turns: Turns) -> None:
    """Runs grpo.py's loop, which begins an iteration when the other side has ended its own."""
    sys.path.insert(0, str(ROOT))
    import grpo
    from benchmarks.common import configured
    from torchgrpo.batches.rollout import Rollout
    from torchgrpo.rollout.engines.backends import transformers, vllm
    from torchgrpo.run.build import build
    from torchgrpo.run.lockstep import Lockstep
    from torchgrpo.training import model_files

    class InTurns(Lockstep):
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
            completions = [one for group in groups for one in group.completions]
            turns.said["tokens"] = sum(len(one.token_ids) for one in completions)
            turns.said["prompt_tokens"] = sum(len(group.prompt) * len(group.completions) for group in groups)
            rewards = [one.verdict.score for one in completions if one.verdict is not None]
            turns.said["reward"] = sum(rewards) / len(rewards)
            return rollout

        def advantage(self, rollout: Rollout) -> None:
            with turns.clock("optimize"):
                super().advantage(rollout)

        def learn(self, minibatch: Rollout) -> None:
            with turns.clock("optimize"):
                super().learn(minibatch)

        def done(self, iteration: int, rollout: Rollout) -> None:
            """The ledger, but neither evaluation nor checkpoint, which TRL is not asked for either."""
            self.monitor.consumed(iteration, rollout.groups, [])

    if job.work.forced:  # vLLM refuses an end token that its model cannot draw
        for backend in (transformers, vllm):
            backend.saved_eos_token_ids = lambda name, tokenizer: []  # type: ignore[attr-defined]
        model_files.check_files = lambda config, tokenizer, longest=0: None
    with tempfile.TemporaryDirectory() as folder:
        working = build(configured("grpo_quickstart", *own_settings(job)), Path(folder), InTurns)
        grpo.train(working)
        working.close("finished")


def own_settings(job: Job) -> list[str]:
    """Everything that the workload says in place of the quickstart's config."""
    work = job.work
    precision = {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    return [
        *("device=auto", "env.dataset=jsonl", "env.options={}", f"env.data_files={job.rows}"),
        *(f"env.num_envs={work.prompts}", f"env.repeats={work.repeats}", "env.max_prompt_tokens=512"),
        *(f"env.reward=benchmarks.peer_sides:{work.reward}", f"train.seed={SEED}"),
        *(f"model.name={job.model}", f"model.dtype={work.dtype}", f"train.mixed_precision={precision}"),
        f"train.total_dialog_turns={job.rounds * work.completions}",
        f"train.gradient_accumulation_steps={work.completions // work.microbatch}",
        *(f"train_model.num_threads={job.threads}", f"inference_model.backend={job.engine}"),
        *(f"inference_model.dtype={work.dtype}", f"inference_model.max_tokens={work.max_tokens}"),
        *("policy.kl_coef=0", f"optimizer.lr={LEARNING_RATE}", f"optimizer.betas=[{BETAS[0]},{BETAS[1]}]"),
        *("optimizer.schedule=constant", "optimizer.warmup_steps=0", *job.options),
    ]


def trl_side(job: Job, turns: Turns) -> None:
    """Runs TRL's GRPOTrainer, which begins an iteration when the other side has ended its own."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate(self, prompts: list[Any]) -> Any:
            with turns.clock("generate"):
                made = super()._generate(prompts)
            prompt_ids, completion_ids, *_ = made
            turns.said["tokens"] += sum(map(len, completion_ids))
            turns.said["prompt_tokens"] += sum(map(len, prompt_ids))
            return made

        def _calculate_rewards(self, *args: Any) -> Any:
            with turns.clock("score"):
                rewards = super()._calculate_rewards(*args)
            turns.said["reward"] = float(rewards.mean())
            return rewards

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with turns.clock("step"):
                return super().training_step(*args, **kwargs)

    class Waiting(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not turns.wait():
                raise SystemExit

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            turns.wait()

    torch.set_num_threads(job.threads)
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])
    judge = {"right_number": right_number, "share_of_even": share_of_even}[job.work.reward]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [SimpleNamespace(text=one[0]["content"]) for one in completions]
        golds = [SimpleNamespace(answer=gold) for gold in answer]
        return [judge(*pair) for pair in zip(texts, golds, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(output_dir=folder, **trl_settings(job, torch.cuda.is_available()))
        Timed(job.model, reward, args=settings, train_dataset=data, callbacks=[Waiting()]).train()


def trl_settings(job: Job, gpu: bool) -> dict[str, Any]:
    """One generation an optimizer step, no KL, nothing saved, nothing logged; see peer_trl.py for the choices."""
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
    plain = {
        "beta": 0.0,
        "num_iterations": 1,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
    }
    order = {"shuffle_dataset": False, "seed": SEED, "use_cpu": not gpu, "dataloader_pin_memory": gpu}
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    chosen: dict[str, Any] = {**sizes, **adam, **plain, **order, **quiet}
    for option in job.options:
        name, _, value = option.partition("=")
        chosen[name] = json.loads(value)
    return chosen


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    asked = Job.read(Path(sys.argv[1]))
    (trl_side if asked.engine == "trl" else own_side)(asked, Turns(int(sys.argv[2])))
