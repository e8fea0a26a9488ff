"""Runs with two turns per completion, in both schedules and in evaluation."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from config.schema.errors import RunError
from envs.example import Example
from tests.run_environments import HANGS
from tests.script_runner import SCHEDULE_CLASSES, compose_run_config, read_metrics
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.episode_player import EpisodePlayer
from torchgrpo.run.job import run_job

TURNS = ("env.max_steps=2", "env.reasoning=true", "env.reasoning_prompt='?'", "inference_model.max_tokens=16")
SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
SETS = "eval.sets={held_out:{dataset:arithmetic,n:2,limit:5}}"
EPISODES = (
    "env.environment=tests.run_environments:WaitingSums",
    "env.environment_options.window=true",
    "env.max_steps=3",
    "env.turn_tokens=8",
    "inference_model.max_tokens=24",
)


@pytest.mark.parametrize(
    ("script", "age", "more"),
    [(grpo, 0, ()), (grpo_async, 2, ()), pytest.param(grpo_async, 2, ("ray.enabled=true",), marks=pytest.mark.long)],
    ids=["lockstep", "overlapped", "overlapped, a Ray actor"],
)
def test_a_run_of_two_turns(script: ModuleType, age: int, more: tuple[str, ...], tmp_path: Path) -> None:
    config = compose_run_config(*SMALL, *TURNS, SETS, f"train.max_policy_age={age}", *more)
    run_job(config, tmp_path, script.train, SCHEDULE_CLASSES[script])
    metrics = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert len(metrics) == 4
    for row in metrics:
        assert row["age/max"] <= age
        assert 1.8 < row["turns/mean"] <= 2
        assert row["turns/sampled_tokens"] < row["length/response_mean"]
        if row["age/max"] == 0:
            assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
            assert row["ess"] == pytest.approx(1.0, abs=1e-4)
    records = [json.loads(line) for line in (tmp_path / "eval/held_out/iteration_0.jsonl").read_text().splitlines()]
    assert len(records) == 10
    assert sum("?" in line["completion"] for line in records) >= 8  # with the second turn


@pytest.mark.parametrize(("script", "age"), [(grpo, 0), (grpo_async, 2)], ids=["lockstep", "overlapped"])
def test_a_run_of_episodes_with_several_sequences(script: ModuleType, age: int, tmp_path: Path) -> None:
    config = compose_run_config(*SMALL, *EPISODES, SETS, f"train.max_policy_age={age}")
    run_job(config, tmp_path, script.train, SCHEDULE_CLASSES[script])
    metrics = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert len(metrics) == 4
    for row in metrics:
        assert row["turns/mean"] == row["turns/max"] == row["agent/sequences"] == 3
        assert row["agent/end/stop"] == 1 and row["age/max"] <= age
        if row["age/max"] == 0:
            assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
    records = [json.loads(line) for line in (tmp_path / "eval/held_out/iteration_0.jsonl").read_text().splitlines()]
    assert len(records) == 10 and all(line["finish_reason"] == "stop" for line in records)


@pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])
def test_a_run_whose_episodes_all_end_before_a_turn_learned_nothing(script: ModuleType, tmp_path: Path) -> None:
    """The reset takes longer than an episode may, so no completion has a token."""
    slow = ("env.environment_options.wait_ms=600000", "env.episode_timeout_s=0.05", "train.max_policy_age=0")
    config = compose_run_config(*SMALL, *EPISODES, *slow)
    with pytest.raises(RunError, match=r"none of 4 optimizer steps .*100% of the completions were invalid"):
        run_job(config, tmp_path, script.train, SCHEDULE_CLASSES[script])
    metrics = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert len(metrics) == 4
    assert all(row["reward/mean"] == 0 and row["length/response_max"] == 0 for row in metrics)


def test_completions_without_a_token_do_not_disturb_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second episode hangs, and has a deadline of its own."""
    play = EpisodePlayer._play_with_deadline

    async def hang_every_second(player: EpisodePlayer, request: Request, example: Example, row: int) -> Any:
        HANGS.set(row % 2 == 1)
        player.seconds = 0.05 if row % 2 else 600.0
        return await play(player, request, example, row)

    monkeypatch.setattr(EpisodePlayer, "_play_with_deadline", hang_every_second)
    some = ("env.environment=tests.run_environments:HangingForSome", "env.episode_timeout_s=600")
    config = compose_run_config(*SMALL, *EPISODES, *some, "train.total_dialog_turns=16")
    run_job(config, tmp_path, grpo.train, SCHEDULE_CLASSES[grpo])
    (row,) = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert row["reward/invalid"] >= 0.5 and row["length/response_max"] > 0
    assert 0 < row["grad_norm"] < 1e6 and row["loss/nonfinite_steps"] == 0
