"""What is sampled and what of it is trained on, in both schedules: dynamic sampling, oversampling, temperature."""

from pathlib import Path
from types import ModuleType

import pytest

import grpo
import grpo_async
from tests.scripts import SCHEDULE_OF, configured, rows
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.build import build
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep

SMALL = ("env.num_envs=8", "env.repeats=4", "train.total_dialog_turns=96", "policy.kl_coef=0")
DYNAMIC = (*SMALL, "policy.filter_range=[0.01,0.99]", "policy.dynamic_batching=true")
SCHEDULES = pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])


def generated(rollout: Rollout) -> list[int]:
    """Groups that were generated for each place."""
    return [len(list(group.chain())) for group in rollout.groups]


def batches_of(script: ModuleType, run_dir: Path, *overrides: str) -> tuple[list[Rollout], list[str]]:
    """The credited batches of a run, and what it said."""
    working = build(configured(*overrides), run_dir, SCHEDULE_OF[script])
    made: list[Rollout] = []
    said: list[str] = []
    credit = working.learner.credit

    def noted(rollout: Rollout) -> Rollout:
        made.append(credit(rollout))
        return rollout

    working.learner.credit = noted
    working.monitor.say = said.append
    script.train(working)
    working.close("finished")
    return made, said


@SCHEDULES
def test_every_group_has_right_and_wrong_ones(script: ModuleType, tmp_path: Path) -> None:
    in_order = "train.stale_groups=wait"  # the buffer waits for every place, replaced or not
    made, said = batches_of(script, tmp_path, *DYNAMIC, in_order, "policy.filter_attempts=100")
    for one in made:
        for group in one.groups:
            assert 0 < sum(verdict.parts["accuracy"] for verdict in group.verdicts) < 4
        assert len(one.batch.group_id.unique()) == 8
        assert one.batch.mask.any(-1).all()
    assert not any("dynamic sampling" in text for text in said)
    for row, one in zip(rows(tmp_path), made, strict=True):
        count = row["groups/generated"]
        assert count == sum(generated(one)) >= 8
        assert row["sample_utilization"] == pytest.approx(8 / count)
        assert row["reward/zero_variance_groups"] == pytest.approx(1 - 8 / count)
    assert max(row["groups/generated"] for row in rows(tmp_path)) > 8


@SCHEDULES
def test_after_the_cap_it_trains_on_what_there_is_and_says_so(script: ModuleType, tmp_path: Path) -> None:
    made, said = batches_of(
        script, tmp_path, *DYNAMIC, "policy.filter_range=[0.49,0.51]", "policy.filter_attempts=1"
    )
    for one in made:
        inside = (one.batch.next.reward.view(8, 4).mean(1) == 0.5).tolist()
        assert one.batch.mask.any(-1).view(8, 4).any(1).tolist() == inside
        assert max(generated(one)) == 2
    loud = [text for text in said if text.startswith("dynamic sampling: ")]
    assert len(loud) == len(made)
    assert "policy.filter_attempts=1" in loud[0]


def test_without_dynamic_batching_the_groups_outside_are_only_masked(tmp_path: Path) -> None:
    made, _ = batches_of(grpo, tmp_path, *DYNAMIC, "policy.dynamic_batching=false")
    outside = 0
    for one in made:
        rates = one.batch.next.reward.view(8, 4).mean(1)
        mixed = ((rates > 0) & (rates < 1)).tolist()
        assert one.batch.mask.any(-1).view(8, 4).all(1).tolist() == mixed
        outside += mixed.count(False)
    assert outside > 0
    shares = [row["sample_utilization"] for row in rows(tmp_path)]
    assert sum(1 - share for share in shares) == pytest.approx(outside / 8)


@SCHEDULES
def test_oversampling_balances_the_groups(script: ModuleType, tmp_path: Path) -> None:
    made, _ = batches_of(script, tmp_path, *SMALL, "env.oversample=16")
    kept = sum(float(one.batch.next.reward.mean()) for one in made) / len(made)
    raw = sum(row["reward/mean"] for row in rows(tmp_path)) / len(made)
    assert raw < 0.45
    assert raw + 0.05 < kept <= 0.5
    assert all(row["sample_utilization"] == 0.25 for row in rows(tmp_path))


@SCHEDULES
def test_the_log_probs_follow_a_moving_temperature(script: ModuleType, tmp_path: Path) -> None:
    moving = ("inference_model.temperature=1.5", "inference_model.temperature_end=0.5")
    config = configured(*SMALL, *moving, "train.max_policy_age=0", "policy.objective=none", "optimizer.lr=0")
    run_job(config, tmp_path, script.train, SCHEDULE_OF[script])
    metrics = rows(tmp_path)
    assert [row["rollout/temperature"] for row in metrics] == pytest.approx([1.5, 1.0, 0.5])
    for row in metrics:  # the trainer's log-probs are the engine's at every temperature
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert row["kl/inference"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[0]["entropy"] > metrics[1]["entropy"] > metrics[2]["entropy"]


def test_what_length_costs_is_logged(tmp_path: Path) -> None:
    run_job(
        configured(
            *SMALL, "policy.overlong_cache=2", "policy.overlong_fraction=1", "inference_model.max_tokens=3"
        ),
        tmp_path,
        grpo.train,
        Lockstep,
    )
    assert all(-1.0 <= row["reward/length"] < 0.0 for row in rows(tmp_path))
