"""A resumed run gives the same scores: rewards are told the same step, and the lowest score is remembered."""

import shutil
from pathlib import Path
from typing import Any

import grpo
from config.checkpoints import checkpoint_path
from run.jobs import run_job
from run.lockstep import Lockstep
from tests.scripts import configured, rows, without_clocks
from training.checkpoint import load_checkpoint

RUN = (
    *("env.num_envs=4", "env.repeats=2", "train.total_dialog_turns=64", "train.checkpoint_frequency=4"),
    *("env.reward=tests.rewards:scheduled", "env.reward_workers=1", "inference_model.temperature=5"),
    *("policy.baseline=none", "policy.scale=none", "inference_model.max_tokens=24"),
)


def test_scores_of_a_resumed_run_are_the_same(tmp_path: Path) -> None:
    whole, halfway = tmp_path / "whole", tmp_path / "halfway"
    run_job(configured(*RUN), whole, grpo.train, Lockstep)
    logged = [row for row in rows(whole) if "reward/mean" in row]
    assert len(logged) == 8
    assert {row["reward/invalid"] for row in logged} - {0.0, 1.0}, "some are invalid, and not all"
    assert load_checkpoint(checkpoint_path(whole, 4))["lowest_scores"] == {"": -3.0}
    shutil.copytree(whole, halfway)
    shutil.rmtree(checkpoint_path(halfway, 8))
    run_job(configured(*RUN, "train.resume=auto"), halfway, grpo.train, Lockstep)
    assert scores(halfway) == scores(whole)


def scores(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run without clocks, and without the count of invalid completions, which begins with a process."""
    return [{**row, "reward/invalid_total": None} for row in without_clocks(rows(folder))]
