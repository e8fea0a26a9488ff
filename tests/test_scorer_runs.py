"""Whole runs with scorers: killed ones change no number of a run."""

import os
import signal
from pathlib import Path

import pytest

import grpo
import grpo_async
from tests.killed_ranks import Killer
from tests.scripts import configured, rows, without_clocks
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped

SMALL = (
    *("env.num_envs=4", "env.repeats=4", "env.options.max_operand=6", "policy.kl_coef=0.1"),
    *("train.total_dialog_turns=64", "train.checkpoint_frequency=2", "train_model.num_threads=1"),
    *("train.gradient_accumulation_steps=2", "ref_model.num_devices=1"),
)
TWO_OF_EACH = ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
"""The allocation with which TorchRL's README begins, as processes without GPUs."""
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("local_ray")]


def kill_between_steps(monkeypatch: pytest.MonkeyPatch, iteration: int) -> list[int]:
    """Kill the idle scorer after an iteration and its checkpoint; returns its process id."""
    killed: list[int] = []
    done = Lockstep.done

    def killing(schedule: Lockstep, number: int, rollout: Rollout) -> None:
        done(schedule, number, rollout)
        scorers = schedule.learner.scorers  # type: ignore[attr-defined]
        if number == iteration:
            killed.append(scorers.copies[0].ranks.process_ids[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Lockstep, "done", killing)
    return killed


def trained(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    run_job(configured(*SMALL, *overrides), run_dir, grpo.train, Lockstep)
    return without_clocks(rows(run_dir))


@pytest.fixture(scope="module")
def undisturbed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return trained(tmp_path_factory.mktemp("undisturbed"))


def test_a_scorer_that_is_killed_at_five_moments_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[dict[str, float]]
) -> None:
    """The scorer dies while it loads, in a score, while the next one loads, and idle:
    without a restart of the run, and with the bits of one that nobody disturbed."""
    moments = [("build", 1), ("log_prob", 2), ("build", 1), ("log_prob", 3)]
    killer = Killer(monkeypatch, "scorer", *moments)
    killed = kill_between_steps(monkeypatch, 2)
    disturbed = trained(tmp_path, "train.restarts=0")
    assert not killer.left and killed
    assert disturbed == undisturbed
    assert undisturbed[-1]["kl/ref"] > 0


def test_a_run_whose_scorer_is_lost_too_often_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[dict[str, float]]
) -> None:
    killer = Killer(monkeypatch, "scorer", ("log_prob", 4), ("log_prob", 1), ("log_prob", 1))
    disturbed = trained(tmp_path, "train.checkpoint_frequency=1", "train.restarts=1")
    assert not killer.left
    assert disturbed == undisturbed


def test_an_overlapped_run_whose_scorer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies score groups as they come; a group of a lost copy is scored again."""
    killer = Killer(monkeypatch, "scorer", ("log_prob", 2), ("log_prob", 5))
    config = configured(*SMALL, *TWO_OF_EACH, "train.max_policy_age=1", "train.restarts=0")
    run_job(config, tmp_path, grpo_async.train, Overlapped)
    assert not killer.left
    assert [row["optimizer_step"] for row in rows(tmp_path)] == list(range(1, 5))
    assert all(row["age/max"] <= 1 for row in rows(tmp_path))


def test_two_learner_ranks_two_scorers_and_two_engines(tmp_path: Path) -> None:
    """The rows of one process, up to rounding."""
    one = trained(tmp_path / "one", "ref_model.num_devices=null")
    two = trained(tmp_path / "two", *TWO_OF_EACH)
    for here, there in zip(one, two, strict=True):
        assert there == pytest.approx(here, rel=1e-3, abs=1e-5)
