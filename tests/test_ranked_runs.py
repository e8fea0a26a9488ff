"""Tests runs with two learner ranks: equality with one process, and kills."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import grpo
import grpo_async
from config.run_folder.checkpoints import newest_checkpoint
from config.schema.errors import RankLost
from tests.killed_ranks import RankKiller
from tests.script_runner import compose_run_config, read_metrics, without_timings
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun
from torchgrpo.training import ranks

SMALL = (
    *("env.num_envs=4", "env.repeats=4", "env.options.max_operand=6", "policy.kl_coef=0.1"),
    *("train.total_dialog_turns=96", "train.checkpoint_frequency=1", "train_model.num_threads=1"),
)
TWO_RANKS = "train_model.num_devices=2"
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("local_ray")]


def train_metrics(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """Trains, and returns the rows of metrics without clocks."""
    run_job(compose_run_config(*SMALL, *overrides), run_dir, grpo.train, LockstepRun)
    return without_timings(read_metrics(run_dir))


def assert_close(first: Sequence[dict[str, float]], second: Sequence[dict[str, float]]) -> None:
    assert len(first) == len(second)
    for expected, actual in zip(first, second, strict=True):
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_ranks_that_are_killed_at_six_moments_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run restarts by itself after killed ranks, and ends with the same bits.

    Kills come in the gradients of a step, its update, a push, a score of the reference model, a checkpoint, and while
    the model is loaded. Then the run is resumed in one process, and from there on two ranks again.
    """
    undisturbed = train_metrics(tmp_path / "undisturbed", TWO_RANKS)
    moments = [
        ("gradients", 3),
        ("update", 1),
        ("gather_tensors", 3),
        ("reference_log_prob", 2),
        ("end_save", 2),
        ("build", 1),
    ]
    killer = RankKiller(monkeypatch, "learner rank 1", *moments)
    disturbed = train_metrics(tmp_path / "disturbed", TWO_RANKS, "train.restarts=6")
    assert not killer.remaining
    assert disturbed == undisturbed
    monkeypatch.undo()
    one_process = tmp_path / "one"
    fourth = tmp_path / "undisturbed" / "checkpoints" / "checkpoint_000004"
    assert_close(undisturbed, train_metrics(one_process, f"train.resume={fourth}"))
    fifth = one_process / "checkpoints" / "checkpoint_000005"
    assert_close(undisturbed, train_metrics(tmp_path / "two", TWO_RANKS, f"train.resume={fifth}"))


def test_ranks_that_share_microbatches(tmp_path: Path) -> None:
    """A run of two such ranks learns as one process, and resumes with equal bits."""
    shared = (TWO_RANKS, "train_model.context_parallel=2")
    rows = train_metrics(tmp_path / "shared", *shared)
    expected = train_metrics(tmp_path / "one")
    assert_close(expected, rows)
    fourth = tmp_path / "shared" / "checkpoints" / "checkpoint_000004"
    again = train_metrics(tmp_path / "again", *shared, f"train.resume={fourth}")
    assert again == rows[-len(again) :]


def test_a_dead_rank_ends_the_run_with_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RankKiller(monkeypatch, "learner rank 1", ("update", 4))
    monkeypatch.setattr(ranks, "_GRACE_S", 600.0)  # on a busy machine Ray may report the death late
    with pytest.raises(RankLost) as error:
        train_metrics(tmp_path, TWO_RANKS, "train.async_checkpoint=false")
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "checkpoint_000003"
    first, *others = str(error.value).splitlines()
    assert first.startswith("learner rank 1 (CPU) died in update (pid ")
    assert str(newest) in others[0] and "train.resume=auto" in others[-1]


def test_the_overlapped_schedule_on_two_ranks(tmp_path: Path) -> None:
    config = compose_run_config(*SMALL, TWO_RANKS, "train.max_policy_age=1")
    run_job(config, tmp_path, grpo_async.train, OverlappedRun)
    assert [row["optimizer_step"] for row in read_metrics(tmp_path)] == list(range(1, 7))
    assert all(row["age/max"] <= 1 for row in read_metrics(tmp_path))
