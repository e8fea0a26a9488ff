"""TRL's side of `peer_trl.py`: GRPOTrainer in an environment of its own, an iteration whenever it is its turn.

python benchmarks/peer_trl_side.py JOB DESCRIPTOR        (peer_trl.py starts it)
"""

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.peer_work import BETAS, LEARNING_RATE, REWARDS, SEED, Job, Turns  # noqa: E402


class Timed(GRPOTrainer):
    """GRPOTrainer with a clock around what its own profiling names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.said: dict[str, float] = defaultdict(float)
        super().__init__(*args, **kwargs)

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.said[stage] += time.perf_counter() - began

    def _generate(self, prompts: list[Any]) -> Any:
        with self.clock("generate"):
            made = super()._generate(prompts)
        prompt_ids, completion_ids, *_ = made
        self.said["tokens"] += sum(map(len, completion_ids))
        self.said["prompt_tokens"] += sum(map(len, prompt_ids))
        return made

    def _calculate_rewards(self, *args: Any) -> Any:
        with self.clock("score"):
            rewards = super()._calculate_rewards(*args)
        self.said["reward"] = float(rewards.mean())
        return rewards

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("step"):
            return super().training_step(*args, **kwargs)


class Waiting(TrainerCallback):
    """Begins an iteration when the other side has ended its own."""

    trainer: Timed

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def wait(self) -> None:
        said = dict(self.trainer.said)
        self.trainer.said.clear()
        if torch.cuda.is_available():
            said["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if not self.turns.wait(**said):
            raise SystemExit

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.wait()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.wait()


def settings(job: Job, folder: str) -> GRPOConfig:
    """One generation an optimizer step, no KL, nothing saved, nothing logged; see peer_trl.py for the choices."""
    work = job.work
    half = work.dtype == "bfloat16"
    chosen: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": work.microbatch,
        "gradient_accumulation_steps": work.completions // work.microbatch,
        "num_generations": work.repeats,
        "max_completion_length": work.max_tokens,
        "max_steps": job.rounds,
        "model_init_kwargs": {"dtype": work.dtype},
        "bf16": half,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "beta": 0.0,
        "num_iterations": 1,
        "learning_rate": LEARNING_RATE,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "seed": SEED,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    for option in job.options:
        name, _, value = option.partition("=")
        chosen[name] = json.loads(value)
    return GRPOConfig(**chosen)


def main() -> None:
    job, turns = Job.read(Path(sys.argv[1])), Turns(int(sys.argv[2]))
    torch.set_num_threads(job.threads)
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])
    judge = REWARDS[job.work.reward]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [judge(one[0]["content"], gold) for one, gold in zip(completions, answer, strict=True)]

    waiting = Waiting(turns)
    with tempfile.TemporaryDirectory() as folder:
        waiting.trainer = Timed(
            job.model, reward, args=settings(job, folder), train_dataset=data, callbacks=[waiting]
        )
        model = next(waiting.trainer.model.parameters())
        print(
            f"  TRL {trl.__version__}, torch {torch.__version__}, {model.dtype} on {model.device}, "
            f"{torch.get_num_threads()} threads, {waiting.trainer.args.optim}"
        )
        waiting.trainer.train()


if __name__ == "__main__":
    main()
