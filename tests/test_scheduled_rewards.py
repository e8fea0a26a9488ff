"""Runs with negative rewards and with rewards that depend on the step."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from config.run_folder.checkpoints import checkpoint_path
from tests.diagnostics.short_runs import run_quickstart
from tests.script_runner import compose_run_config, read_metrics, without_timings
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.checkpoint import load_checkpoint

RUN = (
    *("env.num_envs=4", "env.repeats=2", "train.total_dialog_turns=64", "train.checkpoint_frequency=4"),
    *("env.reward=tests.rewards:scheduled_reward", "env.reward_workers=1", "inference_model.temperature=5"),
    *("policy.baseline=none", "policy.scale=none", "inference_model.max_tokens=24"),
)


@pytest.mark.long
def test_metrics_of_a_resumed_run_are_the_same(tmp_path: Path) -> None:
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    run_job(compose_run_config(*RUN), uninterrupted, grpo.train, LockstepRun)
    metrics = [row for row in read_metrics(uninterrupted) if "reward/mean" in row]
    assert len(metrics) == 8
    assert {row["reward/invalid"] for row in metrics} - {0.0, 1.0}, "some completions are invalid, and not all"
    assert load_checkpoint(checkpoint_path(uninterrupted, 4))["lowest_scores"] == {"": -3.0}
    shutil.copytree(uninterrupted, resumed)
    shutil.rmtree(checkpoint_path(resumed, 8))
    run_job(compose_run_config(*RUN, "train.resume=auto"), resumed, grpo.train, LockstepRun)
    assert comparable_metrics(resumed) == comparable_metrics(uninterrupted)


def comparable_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics rows of a run without times and per-process counts."""
    return [{**row, "reward/invalid_total": None} for row in without_timings(read_metrics(folder))]


@pytest.mark.parametrize("baseline", ["mean", "none"])
def test_a_constant_negative_reward_trains_nothing(baseline: str, tmp_path: Path) -> None:
    """Completions with control tokens also get the lowest reward, not 0."""
    error_message = run_quickstart(
        tmp_path,
        *("env.num_envs=8", "env.repeats=4", "train.total_dialog_turns=160", "policy.kl_coef=0"),
        *("env.reward=tests.diagnostics.rewards:always_minus_three", "inference_model.temperature=5"),
        *(f"policy.baseline={baseline}", "policy.scale=none", "inference_model.max_tokens=24"),
    )
    metrics = read_metrics(tmp_path)
    assert len(metrics) == 5 and any(row["reward/invalid"] > 0.1 for row in metrics)
    assert {row["reward/mean"] for row in metrics} == {-3.0}
    if baseline == "mean":
        assert {row["grad_norm"] for row in metrics} == {0.0}
        assert error_message is not None and "nothing was learned" in error_message


@pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])
def test_a_reward_gets_the_step_in_training_and_evaluation(script: ModuleType, tmp_path: Path) -> None:
    run_quickstart(
        tmp_path,
        *("env.num_envs=4", "env.repeats=2", "train.total_dialog_turns=32"),
        *("env.reward=tests.rewards:steps_done", "env.reward_workers=1"),
        *("eval.sets={held:{dataset:arithmetic,limit:2}}", "eval.frequency=2"),
        script=script,
    )
    training_rewards = [row["reward/mean"] for row in read_metrics(tmp_path) if "reward/mean" in row]
    eval_scores = [row["eval/held/score"] for row in read_metrics(tmp_path) if "eval/held/score" in row]
    assert eval_scores == [0.0, 0.5, 1.0]
    if script is grpo:
        assert training_rewards == [0.0, 0.25, 0.5, 0.75]
    assert training_rewards[0] == 0.0 and training_rewards == sorted(training_rewards)
