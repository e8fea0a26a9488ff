"""Rewards below zero, and rewards that follow the step, over resumes too."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from config.run_folder.checkpoints import checkpoint_path
from tests.doctor.running import run
from tests.scripts import configured, rows, without_clocks
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.training.checkpoint import load_checkpoint

RUN = (
    *("env.num_envs=4", "env.repeats=2", "train.total_dialog_turns=64", "train.checkpoint_frequency=4"),
    *("env.reward=tests.rewards:scheduled", "env.reward_workers=1", "inference_model.temperature=5"),
    *("policy.baseline=none", "policy.scale=none", "inference_model.max_tokens=24"),
)


@pytest.mark.long
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
    """Rows of a run without clocks and without counts of one process."""
    return [{**row, "reward/invalid_total": None} for row in without_clocks(rows(folder))]


@pytest.mark.parametrize("baseline", ["mean", "none"])
def test_a_reward_of_minus_three_for_everything_moves_nothing(baseline: str, tmp_path: Path) -> None:
    """Answers with control tokens were the way out while they scored 0."""
    said = run(
        tmp_path,
        *("env.num_envs=8", "env.repeats=4", "train.total_dialog_turns=160", "policy.kl_coef=0"),
        *("env.reward=tests.doctor.rewards:always_minus_three", "inference_model.temperature=5"),
        *(f"policy.baseline={baseline}", "policy.scale=none", "inference_model.max_tokens=24"),
    )
    logged = rows(tmp_path)
    assert len(logged) == 5 and any(row["reward/invalid"] > 0.1 for row in logged)
    assert {row["reward/mean"] for row in logged} == {-3.0}
    if baseline == "mean":
        assert {row["grad_norm"] for row in logged} == {0.0}
        assert said is not None and "nothing was learned" in said


@pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])
def test_a_reward_is_told_the_step_in_training_and_evaluation(script: ModuleType, tmp_path: Path) -> None:
    run(
        tmp_path,
        *("env.num_envs=4", "env.repeats=2", "train.total_dialog_turns=32"),
        *("env.reward=tests.rewards:steps_done", "env.reward_workers=1"),
        *("eval.sets={held:{dataset:arithmetic,limit:2}}", "eval.frequency=2"),
        script=script,
    )
    trained = [row["reward/mean"] for row in rows(tmp_path) if "reward/mean" in row]
    evaluated = [row["eval/held/score"] for row in rows(tmp_path) if "eval/held/score" in row]
    assert evaluated == [0.0, 0.5, 1.0]
    if script is grpo:
        assert trained == [0.0, 0.25, 0.5, 0.75]
    assert trained[0] == 0.0 and trained == sorted(trained)
