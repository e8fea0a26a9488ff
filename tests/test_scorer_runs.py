"""Tests runs with scorers: kills of scorers change no metric."""

import os
import signal
from pathlib import Path

import pytest

import grpo
import grpo_async
from tests.killed_ranks import RankKiller
from tests.script_runner import compose_run_config, read_metrics, without_timings
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun

SMALL = (
    *("env.num_envs=4", "env.repeats=4", "env.options.max_operand=6", "policy.kl_coef=0.1"),
    *("train.total_dialog_turns=64", "train.checkpoint_frequency=2", "train_model.num_threads=1"),
    *("train.gradient_accumulation_steps=2", "ref_model.num_devices=1"),
)
TWO_OF_EACH = ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
"""The allocation with which TorchRL's README begins, as processes without GPUs."""
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("local_ray")]


def kill_between_steps(monkeypatch: pytest.MonkeyPatch, iteration: int) -> list[int]:
    """Kills the idle scorer after an iteration and its checkpoint.

    Returns a list that will hold the scorer's process id.
    """
    killed_pids: list[int] = []
    end_iteration = LockstepRun.end_iteration

    def end_and_kill(schedule: LockstepRun, number: int, rollout: Rollout) -> None:
        end_iteration(schedule, number, rollout)
        scorers = schedule.learner.scorers  # type: ignore[attr-defined]
        if number == iteration:
            killed_pids.append(scorers.copies[0].ranks.process_ids[0])
            os.kill(killed_pids[0], signal.SIGKILL)

    monkeypatch.setattr(LockstepRun, "end_iteration", end_and_kill)
    return killed_pids


def train_metrics(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    run_job(compose_run_config(*SMALL, *overrides), run_dir, grpo.train, LockstepRun)
    return without_timings(read_metrics(run_dir))


@pytest.fixture(scope="module")
def reference_rows(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return train_metrics(tmp_path_factory.mktemp("undisturbed"))


def test_a_scorer_that_is_killed_at_five_moments_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_rows: list[dict[str, float]]
) -> None:
    """A killed scorer is replaced without a restart, and the metrics are bit-identical.

    The scorer dies while it loads, during a score, while its replacement loads, and while it is idle.
    """
    moments = [("build", 1), ("log_prob", 2), ("build", 1), ("log_prob", 3)]
    killer = RankKiller(monkeypatch, "scorer", *moments)
    killed_pids = kill_between_steps(monkeypatch, 2)
    disturbed_rows = train_metrics(tmp_path, "train.restarts=0")
    assert not killer.remaining and killed_pids
    assert disturbed_rows == reference_rows
    assert reference_rows[-1]["kl/ref"] > 0


def test_a_run_whose_scorer_is_lost_too_often_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_rows: list[dict[str, float]]
) -> None:
    killer = RankKiller(monkeypatch, "scorer", ("log_prob", 4), ("log_prob", 1), ("log_prob", 1))
    disturbed_rows = train_metrics(tmp_path, "train.checkpoint_frequency=1", "train.restarts=1")
    assert not killer.remaining
    assert disturbed_rows == reference_rows


def test_an_overlapped_run_whose_scorer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scorer copies score groups; a group of a lost copy is scored again."""
    killer = RankKiller(monkeypatch, "scorer", ("log_prob", 2), ("log_prob", 5))
    config = compose_run_config(*SMALL, *TWO_OF_EACH, "train.max_policy_age=1", "train.restarts=0")
    run_job(config, tmp_path, grpo_async.train, OverlappedRun)
    assert not killer.remaining
    assert [row["optimizer_step"] for row in read_metrics(tmp_path)] == list(range(1, 5))
    assert all(row["age/max"] <= 1 for row in read_metrics(tmp_path))


def test_two_learner_ranks_two_scorers_and_two_engines(tmp_path: Path) -> None:
    """Metrics equal those of one process, up to rounding."""
    one = train_metrics(tmp_path / "one", "ref_model.num_devices=null")
    two = train_metrics(tmp_path / "two", *TWO_OF_EACH)
    for expected, actual in zip(one, two, strict=True):
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-5)
