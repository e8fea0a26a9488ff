"""What is sampled and what of it is trained on, in both schedules: dynamic sampling, oversampling, temperature."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import grpo
import grpo_async
from config.schema import Config
from run.build import build
from run.jobs import run_job
from run.lockstep import Lockstep
from tests.scripts import configured, rows, without_clocks

SMALL = ("env.num_envs=8", "env.repeats=4", "train.total_dialog_turns=96", "policy.kl_coef=0")
DYNAMIC = (*SMALL, "policy.filter_range=[0.01,0.99]", "policy.dynamic_batching=true")
Train = Callable[[Config, Parts], None]
SCHEDULES = pytest.mark.parametrize("train", [grpo.train, grpo_async.train], ids=["lockstep", "overlapped"])


def batches_of(train: Train, run_dir: Path, *overrides: str) -> tuple[list[Any], list[str]]:
    """The prepared batches of a run, and what it said."""
    parts = build(configured(*overrides), run_dir)
    prepare, batches, said = parts.learner.prepare, [], []

    def noted(batch: Any) -> Any:
        batches.append(prepare(batch))
        return batches[-1]

    parts.learner.prepare = noted
    parts.monitor.say = said.append
    train(parts.config, parts)
    parts.close("finished")
    return batches, said


@SCHEDULES
def test_every_group_has_right_and_wrong_ones(train: Train, tmp_path: Path) -> None:
    in_order = "train.stale_groups=wait"  # the buffer waits for every place, replaced or not
    batches, said = batches_of(train, tmp_path, *DYNAMIC, in_order, "policy.filter_attempts=100")
    for batch in batches:
        rates = batch["next", "reward_parts", "accuracy"].view(8, 4).mean(1)
        assert ((rates > 0) & (rates < 1)).all()
        assert len(batch["group_id"].unique()) == 8
        assert batch["mask"].any(-1).all()
    assert not any("dynamic sampling" in text for text in said)
    for row, batch in zip(rows(tmp_path), batches, strict=True):
        generated = row["groups/generated"]
        assert generated == batch["generated", "groups"][::4].sum() >= 8
        assert row["sample_utilization"] == pytest.approx(8 / generated)
        assert row["reward/zero_variance_groups"] == pytest.approx(1 - 8 / generated)
    assert max(row["groups/generated"] for row in rows(tmp_path)) > 8


@SCHEDULES
def test_after_the_cap_it_trains_on_what_there_is_and_says_so(train: Train, tmp_path: Path) -> None:
    batches, said = batches_of(
        train, tmp_path, *DYNAMIC, "policy.filter_range=[0.49,0.51]", "policy.filter_attempts=1"
    )
    for batch in batches:
        inside = (batch["next", "reward"].view(8, 4).mean(1) == 0.5).tolist()
        assert batch["mask"].any(-1).view(8, 4).any(1).tolist() == inside
        assert batch["generated", "groups"].max() == 2
    loud = [text for text in said if text.startswith("dynamic sampling: ")]
    assert len(loud) == len(batches)
    assert "policy.filter_attempts=1" in loud[0]


def test_without_dynamic_batching_the_groups_outside_are_only_masked(tmp_path: Path) -> None:
    batches, _ = batches_of(grpo.train, tmp_path, *DYNAMIC, "policy.dynamic_batching=false")
    outside = 0
    for batch in batches:
        rates = batch["next", "reward"].view(8, 4).mean(1)
        mixed = ((rates > 0) & (rates < 1)).tolist()
        assert batch["mask"].any(-1).view(8, 4).all(1).tolist() == mixed
        outside += mixed.count(False)
    assert outside > 0
    shares = [row["sample_utilization"] for row in rows(tmp_path)]
    assert sum(1 - share for share in shares) == pytest.approx(outside / 8)


@SCHEDULES
def test_oversampling_balances_the_groups(train: Train, tmp_path: Path) -> None:
    batches, _ = batches_of(train, tmp_path, *SMALL, "env.oversample=16")
    kept = sum(float(batch["next", "reward"].mean()) for batch in batches) / len(batches)
    raw = sum(row["reward/mean"] for row in rows(tmp_path)) / len(batches)
    assert raw < 0.45
    assert raw + 0.05 < kept <= 0.5
    assert all(row["sample_utilization"] == 0.25 for row in rows(tmp_path))


@SCHEDULES
def test_the_log_probs_follow_a_moving_temperature(train: Train, tmp_path: Path) -> None:
    moving = ("inference_model.temperature=1.5", "inference_model.temperature_end=0.5")
    config = configured(*SMALL, *moving, "train.max_policy_age=0", "policy.objective=none", "optimizer.lr=0")
    run_job(config, tmp_path, train)
    metrics = rows(tmp_path)
    assert [row["rollout/temperature"] for row in metrics] == pytest.approx([1.5, 1.0, 0.5])
    for row in metrics:  # the trainer's log-probs are the engine's at every temperature
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert row["kl/inference"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[0]["entropy"] > metrics[1]["entropy"] > metrics[2]["entropy"]


def test_a_resumed_run_replaces_groups_and_cools_as_if_never_stopped(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = (*DYNAMIC, "env.oversample=6", "inference_model.temperature_end=0.8")
    for folder in (whole, broken):
        folder.mkdir()
    run_job(configured(*options), whole, grpo.train, Lockstep)

    def stopping(config: Config, parts: Parts) -> None:
        done = parts.iteration_done

        def stop_after_the_first(iteration: int, batch: Any) -> None:
            parts.stop.requested = True
            done(iteration, batch)

        parts.iteration_done = stop_after_the_first
        grpo.train(config, parts)

    run_job(configured(*options), broken, stopping)
    run_job(configured(*options, "train.resume=auto"), broken, grpo.train, Lockstep)
    assert without_clocks(rows(broken)) == without_clocks(rows(whole))


def test_what_length_costs_is_logged(tmp_path: Path) -> None:
    run_job(
        configured(
            *SMALL, "policy.overlong_cache=2", "policy.overlong_fraction=1", "inference_model.max_tokens=3"
        ),
        tmp_path,
        grpo.train,
    )
    assert all(-1.0 <= row["reward/length"] < 0.0 for row in rows(tmp_path))
