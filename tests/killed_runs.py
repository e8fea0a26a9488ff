"""Run that records its training prompts, for tests that kill the process."""

import re
from pathlib import Path
from typing import Any

import torch

import grpo_async
from config.run_folder.checkpoints import newest_checkpoint
from config.schema.config import Config
from tests.script_runner import compose_run_config, find_callback
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.callbacks import CheckpointCallback
from torchgrpo.run.job import run_job
from torchgrpo.run.overlapped_run import OverlappedRun
from torchgrpo.run.training_run import Run

CURRICULUM = (
    "env.curriculum.column=operand",
    "env.curriculum.bins=3",
    "env.curriculum.gate=0.1",
    "env.curriculum.window=5",
    "env.curriculum.priority=learnability",
    "env.curriculum.replay=0.2",
)
EPISODES = (
    "env.environment=tests.run_environments:WaitingSums",
    "env.environment_options.wait_ms=20",
    "env.max_steps=3",
    "inference_model.max_tokens=32",
)
"""Settings of episodes whose environment waits between three turns."""


def one_epoch(stale: str, run_dir: Path, *more: str) -> Config:
    """Returns the config of one epoch: 11 batches of 4 prompts.

    Without a curriculum these are the 44 prompts of additions up to 6 + 6, once each.
    """
    return compose_run_config(
        "env.num_envs=6",
        "env.repeats=2",
        "train.dialog_turns_per_batch=8",
        "train.total_dialog_turns=88",
        "env.options.max_operand=6",
        "train.checkpoint_frequency=1",
        "train.max_policy_age=2",
        f"train.stale_groups={stale}",
        "policy.kl_coef=0",
        *more,
        *(["train.resume=auto"] if newest_checkpoint(run_dir) else []),
    )


def train_noting_prompts(stale: str, more: tuple[str, ...], run_dir: Path, ledger: Path, events: Any) -> None:
    """Trains or resumes a run, and appends the prompts of every optimizer step to `ledger`.

    more: settings, as in `one_epoch`.
    events: a semaphore, released when training begins, after each step and after each checkpoint.
    """
    torch.set_num_threads(1)
    run_dir.mkdir(exist_ok=True)

    class PromptRecorder(OverlappedRun):
        def learn(self, rollout: Rollout) -> None:
            super().learn(rollout)
            prompts = [group.prompt_text for group in rollout.groups]
            sums = [re.findall(r"\d+\+\d+=", prompt)[0] for prompt in prompts]
            with ledger.open("a") as file:
                file.write(f"{self.learner.optimizer_steps}\t{' '.join(sums)}\n")
            events.release()

    def train(working: OverlappedRun) -> None:
        checkpoints = find_callback(working, CheckpointCallback)
        write = checkpoints.write

        def checkpoint(run: Run, iteration: int) -> None:
            write(run, iteration)
            events.release()

        checkpoints.write = checkpoint  # type: ignore[method-assign]
        events.release()
        grpo_async.train(working)

    run_job(one_epoch(stale, run_dir, *more), run_dir, train, PromptRecorder)
