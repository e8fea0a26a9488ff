"""Whole runs whose learner is two ranks: they give what one process gives, and lose nothing when ranks are killed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import grpo
import grpo_async
from config.run_folder.checkpoints import newest_checkpoint
from config.schema.errors import RankLost
from tests.killed_ranks import Killer
from tests.scripts import configured, rows, without_clocks
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped

SMALL = (
    *("env.num_envs=4", "env.repeats=4", "env.options.max_operand=6", "policy.kl_coef=0.1"),
    *("train.total_dialog_turns=96", "train.checkpoint_frequency=1", "train_model.num_threads=1"),
)
TWO = "train_model.num_devices=2"
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("local_ray")]


def trained(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a run that are no clocks."""
    run_job(configured(*SMALL, *overrides), run_dir, grpo.train, Lockstep)
    return without_clocks(rows(run_dir))


def assert_close(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> None:
    assert len(one) == len(other)
    for here, there in zip(one, other, strict=True):
        assert there == pytest.approx(here, rel=1e-3, abs=1e-5)


def test_ranks_that_are_killed_at_six_moments_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the gradients of a step, its update, a push, a score of the reference, a checkpoint, and while the model is
    loaded: the run goes on by itself each time, and ends with the bits of one that nobody disturbed. Then the same run,
    from one of its checkpoints on in one process, and from there on two ranks again."""
    undisturbed = trained(tmp_path / "undisturbed", TWO)
    moments = [
        ("gradients", 3),
        ("update", 1),
        ("tensors", 3),
        ("reference_log_prob", 2),
        ("end_save", 2),
        ("build", 1),
    ]
    killer = Killer(monkeypatch, "learner rank 1", *moments)
    disturbed = trained(tmp_path / "disturbed", TWO, "train.restarts=6")
    assert not killer.left
    assert disturbed == undisturbed
    monkeypatch.undo()
    one = tmp_path / "one"
    fourth = tmp_path / "undisturbed" / "checkpoints" / "checkpoint_000004"
    assert_close(undisturbed, trained(one, f"train.resume={fourth}"))
    fifth = one / "checkpoints" / "checkpoint_000005"
    assert_close(undisturbed, trained(tmp_path / "two", TWO, f"train.resume={fifth}"))


def test_a_dead_rank_ends_the_run_with_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Killer(monkeypatch, "learner rank 1", ("update", 4))
    with pytest.raises(RankLost) as error:
        trained(tmp_path, TWO, "train.async_checkpoint=false")
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "checkpoint_000003"
    first, *others = str(error.value).splitlines()
    assert first.startswith("learner rank 1 (CPU) died in update (pid ")
    assert str(newest) in others[0] and "train.resume=auto" in others[-1]


def test_the_overlapped_schedule_on_two_ranks(tmp_path: Path) -> None:
    config = configured(*SMALL, TWO, "train.max_policy_age=1")
    run_job(config, tmp_path, grpo_async.train, Overlapped)
    assert [row["optimizer_step"] for row in rows(tmp_path)] == list(range(1, 7))
    assert all(row["age/max"] <= 1 for row in rows(tmp_path))
