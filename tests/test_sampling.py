"""Tests dynamic sampling, oversampling and temperature schedules in both schedules of training."""

from pathlib import Path
from types import ModuleType

import pytest

import grpo
import grpo_async
from tests.script_runner import SCHEDULE_CLASSES, compose_run_config, read_metrics
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.build_run import build_run
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun

SMALL = ("env.num_envs=8", "env.repeats=4", "train.total_dialog_turns=96", "policy.kl_coef=0")
DYNAMIC = (*SMALL, "policy.filter_range=[0.01,0.99]", "policy.dynamic_batching=true")
SCHEDULES = pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])


def num_generated_groups(rollout: Rollout) -> list[int]:
    """Returns the number of generated groups for each group of a rollout."""
    return [len(list(group.replacement_chain())) for group in rollout.groups]


def credited_rollouts(script: ModuleType, run_dir: Path, *overrides: str) -> tuple[list[Rollout], list[str]]:
    """Trains, and returns the rollouts with advantages and the logged messages."""
    working = build_run(compose_run_config(*overrides), run_dir, SCHEDULE_CLASSES[script])
    rollouts: list[Rollout] = []
    messages: list[str] = []
    credit = working.learner.credit

    def credit_and_record(rollout: Rollout) -> Rollout:
        rollouts.append(credit(rollout))
        return rollout

    working.learner.credit = credit_and_record
    working.monitor.log = messages.append
    script.train(working)
    working.close("finished")
    return rollouts, messages


@SCHEDULES
def test_every_group_has_right_and_wrong_ones(script: ModuleType, tmp_path: Path) -> None:
    in_order = "train.stale_groups=wait"  # the buffer waits for every group, replaced or not
    rollouts, messages = credited_rollouts(script, tmp_path, *DYNAMIC, in_order, "policy.filter_attempts=100")
    for one in rollouts:
        for group in one.groups:
            assert 0 < sum(verdict.components["accuracy"] for verdict in group.verdicts) < 4
        assert len(one.batch.group_id.unique()) == 8
        assert one.batch.mask.any(-1).all()
    assert not any("dynamic sampling" in text for text in messages)
    for row, one in zip(read_metrics(tmp_path), rollouts, strict=True):
        count = row["groups/generated"]
        assert count == sum(num_generated_groups(one)) >= 8
        assert row["sample_utilization"] == pytest.approx(8 / count)
        assert row["reward/zero_variance_groups"] == pytest.approx(1 - 8 / count)
    assert max(row["groups/generated"] for row in read_metrics(tmp_path)) > 8


@SCHEDULES
def test_after_the_cap_it_trains_on_what_there_is_and_says_so(script: ModuleType, tmp_path: Path) -> None:
    rollouts, messages = credited_rollouts(
        script, tmp_path, *DYNAMIC, "policy.filter_range=[0.49,0.51]", "policy.filter_attempts=1"
    )
    for one in rollouts:
        inside = (one.batch.next.reward.view(8, 4).mean(1) == 0.5).tolist()
        assert one.batch.mask.any(-1).view(8, 4).any(1).tolist() == inside
        assert max(num_generated_groups(one)) == 2
    warnings = [text for text in messages if text.startswith("policy.filter_range=")]
    assert len(warnings) == len(rollouts)
    assert "policy.filter_attempts=1" in warnings[0]


def test_without_dynamic_batching_the_groups_outside_are_only_masked(tmp_path: Path) -> None:
    rollouts, _ = credited_rollouts(grpo, tmp_path, *DYNAMIC, "policy.dynamic_batching=false")
    outside = 0
    for one in rollouts:
        rates = one.batch.next.reward.view(8, 4).mean(1)
        mixed = ((rates > 0) & (rates < 1)).tolist()
        assert one.batch.mask.any(-1).view(8, 4).all(1).tolist() == mixed
        outside += mixed.count(False)
    assert outside > 0
    shares = [row["sample_utilization"] for row in read_metrics(tmp_path)]
    assert sum(1 - share for share in shares) == pytest.approx(outside / 8)


@SCHEDULES
def test_oversampling_balances_the_groups(script: ModuleType, tmp_path: Path) -> None:
    rollouts, _ = credited_rollouts(script, tmp_path, *SMALL, "env.oversample=16")
    kept = sum(float(one.batch.next.reward.mean()) for one in rollouts) / len(rollouts)
    raw = sum(row["reward/mean"] for row in read_metrics(tmp_path)) / len(rollouts)
    assert raw < 0.45
    assert raw + 0.05 < kept <= 0.5
    assert all(row["sample_utilization"] == 0.25 for row in read_metrics(tmp_path))


@SCHEDULES
def test_the_log_probs_follow_a_moving_temperature(script: ModuleType, tmp_path: Path) -> None:
    moving = ("inference_model.temperature=1.5", "inference_model.temperature_end=0.5")
    config = compose_run_config(*SMALL, *moving, "train.max_policy_age=0", "policy.objective=none", "optimizer.lr=0")
    run_job(config, tmp_path, script.train, SCHEDULE_CLASSES[script])
    metrics = read_metrics(tmp_path)
    assert [row["rollout/temperature"] for row in metrics] == pytest.approx([1.5, 1.0, 0.5])
    for row in metrics:  # the trainer's log-probs are the engine's at every temperature
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert row["kl/inference"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[0]["entropy"] > metrics[1]["entropy"] > metrics[2]["entropy"]


def test_what_length_costs_is_logged(tmp_path: Path) -> None:
    run_job(
        compose_run_config(
            *SMALL, "policy.overlong_cache=2", "policy.overlong_fraction=1", "inference_model.max_tokens=3"
        ),
        tmp_path,
        grpo.train,
        LockstepRun,
    )
    assert all(-1.0 <= row["reward/overlong_penalty"] < 0.0 for row in read_metrics(tmp_path))


def test_min_p_and_stop_strings_leave_engine_and_trainer_in_one_distribution(tmp_path: Path) -> None:
    changed = ("inference_model.min_p=0.02", "inference_model.temperature=1.3", "inference_model.stop=['3','77']")
    rollouts, _ = credited_rollouts(grpo, tmp_path, *SMALL, *changed, "optimizer.lr=0")
    completions = [one for rollout in rollouts for group in rollout.groups for one in group.completions]
    stopped = [one for one in completions if "3" in one.text or "77" in one.text]
    assert 0 < len(stopped) < len(completions)
    for one in stopped:
        assert one.finish_reason == "stop"
        assert one.text.endswith(("3", "77"))
        assert not {"3", "77"} & {one.text[:-1], one.text[:-2]}
    gaps = [row["logprob_diff/max"] for row in read_metrics(tmp_path)]
    assert len(gaps) == 3 and max(gaps) < 1e-4
