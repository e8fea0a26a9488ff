"""Whole runs in which pushes are lost: the update after one is never made, whoever finds it out."""

from collections.abc import Callable
from pathlib import Path

import pytest

import grpo
from config.schema import Config
from rollout.engines.transformers_engine import TransformersEngine
from rollout.weights.canary import Canary, CanaryError, _Budget
from run.build import build
from run.lockstep import Lockstep
from tests.scripts import configured

ENOUGH = ("env.num_envs=8", "env.repeats=8", "train.optim_batch_size=64", "train.total_dialog_turns=256")
FEW = ("env.num_envs=2", "env.repeats=2", "train.optim_batch_size=4", "train.total_dialog_turns=16")


def trained(config: Config, folder: Path, see: Callable[[Lockstep], None] = lambda working: None) -> Lockstep:
    working = build(config, folder, Lockstep)
    see(working)
    try:
        grpo.train(working)
    finally:
        working.run.close("finished")
    return working


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions that fixed sequences were to prove, though they take none of the time."""
    versions: list[int] = []
    prove = Canary.prove

    def noted(canary: Canary) -> dict[str, float]:
        versions.append(canary._pushed)
        return prove(canary)

    monkeypatch.setattr(Canary, "prove", noted)
    monkeypatch.setattr(_Budget, "allows", property(lambda budget: budget.began is None))
    return versions


@pytest.mark.parametrize(("size", "proven_so"), [(ENOUGH, [0]), (FEW, [0, 1, 2, 3, 4])])
def test_fixed_sequences_are_asked_only_where_too_little_was_drawn(
    size: tuple[str, ...], proven_so: list[int], asked: list[int], tmp_path: Path
) -> None:
    working = trained(configured(*size), tmp_path)
    assert working.run.learner.optimizer_steps == 4
    assert asked == proven_so


@pytest.mark.parametrize("size", [ENOUGH, FEW])
def test_no_update_follows_a_push_that_was_lost(
    size: tuple[str, ...], asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = TransformersEngine.load
    monkeypatch.setattr(
        TransformersEngine,
        "load",
        lambda engine, weights, version: load(engine, weights, version) if version < 2 else None,
    )
    built: list[Lockstep] = []
    with pytest.raises(CanaryError, match=r"of policy version 2: .*Cause: unchanged"):
        trained(configured(*size), tmp_path, built.append)
    assert built[0].run.learner.optimizer_steps == 2


def test_an_evaluation_is_of_weights_that_are_proven(asked: list[int], tmp_path: Path) -> None:
    sets = "eval.sets={test:{dataset:arithmetic,limit:4}}"
    trained(configured(*ENOUGH, sets, "eval.frequency=2"), tmp_path)
    assert asked == [0, 2, 4]
