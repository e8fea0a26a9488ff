"""Whole runs in which pushes are lost: the update after one is never made, whoever finds it out."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from config.schema import Config
from rollout.engines.transformers_engine import TransformersEngine
from rollout.weights.canary import Canary, CanaryError, _Budget
from rollout.weights.evidence import Answer
from run.build import build
from run.lockstep import Lockstep
from run.overlapped import Overlapped
from tests.scripts import configured

ENOUGH = ("env.num_envs=8", "env.repeats=8", "train.optim_batch_size=64", "train.total_dialog_turns=256")
FEW = ("env.num_envs=2", "env.repeats=2", "train.optim_batch_size=4", "train.total_dialog_turns=16")


def aged(age: int) -> tuple[str, ...]:
    """So that `Behind` trains on what so many pushes are older than, if there were as many."""
    return *ENOUGH, f"train.max_policy_age={age}"


class Behind(Overlapped):
    """The learner is the slower one: as many batches as may wait for it before it pushes."""

    def push_weights(self) -> None:
        if 0 < self.run.monitor.iteration < self.run.last_iteration:
            deadline = time.monotonic() + 60
            config = self.run.config
            left = self.run.last_iteration - self.run.monitor.iteration
            waiting = min(config.train.max_policy_age, left) * config.optim_batch_groups
            while self.stream.buffer.ready < waiting:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        super().push_weights()


def trained(
    script: ModuleType, config: Config, folder: Path, see: Callable[[Any], None] = lambda working: None
) -> Any:
    working = build(config, folder, Behind if script is grpo_async else Lockstep)
    see(working)
    try:
        script.train(working)
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


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Versions that engines were asked about, and the age of what they were asked."""
    heard: list[tuple[int, int]] = []
    hear = Canary._hear

    def noted(canary: Canary, answer: Answer) -> Any:
        heard.append((canary._pushed, answer.age))
        return hear(canary, answer)

    monkeypatch.setattr(Canary, "_hear", noted)
    return heard


@pytest.mark.parametrize(("size", "proven_so"), [(ENOUGH, [0]), (FEW, [0, 1, 2, 3, 4])])
def test_fixed_sequences_are_asked_only_where_too_little_was_drawn(
    size: tuple[str, ...], proven_so: list[int], asked: list[int], tmp_path: Path
) -> None:
    working = trained(grpo, configured(*size), tmp_path)
    assert working.run.learner.optimizer_steps == 4
    assert asked == proven_so


@pytest.mark.parametrize(("age", "heard"), [(1, [(1, 1), (2, 1), (3, 1)]), (2, [(1, 1), (2, 2), (3, 2)])])
def test_a_batch_of_the_weights_before_proves_a_push_by_what_engines_say_of_it(
    age: int, heard: list[tuple[int, int]], asked: list[int], answers: list[tuple[int, int]], tmp_path: Path
) -> None:
    working = trained(grpo_async, configured(*aged(age)), tmp_path)
    assert working.run.learner.optimizer_steps == 4
    assert asked == [0] and answers == heard


def lose(pushes_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = TransformersEngine.load
    monkeypatch.setattr(
        TransformersEngine,
        "load",
        lambda engine, weights, version: load(engine, weights, version) if version < pushes_from else None,
    )


@pytest.mark.parametrize("size", [ENOUGH, FEW])
def test_no_update_follows_a_push_that_was_lost(
    size: tuple[str, ...], asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(2, monkeypatch)
    built: list[Any] = []
    with pytest.raises(CanaryError, match=r"of policy version 2: .*Cause: unchanged"):
        trained(grpo, configured(*size), tmp_path, built.append)
    assert built[0].run.learner.optimizer_steps == 2


@pytest.mark.parametrize("optimizer", [(), ("optimizer.lr=1e-7",)])
@pytest.mark.parametrize("age", [1, 2])
def test_no_overlapped_update_follows_one_either(
    age: int,
    optimizer: tuple[str, ...],
    asked: list[int],
    answers: list[tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However far below its tolerance the update was."""
    lose(2, monkeypatch)
    built: list[Any] = []
    with pytest.raises(CanaryError, match=r"of policy version 2: .*Cause: unchanged"):
        trained(grpo_async, configured(*aged(age), *optimizer), tmp_path, built.append)
    assert built[0].run.learner.optimizer_steps == 2
    assert answers == [(1, 1), (2, age)] and asked == [0, 2]


def test_an_evaluation_is_of_weights_that_are_proven(asked: list[int], tmp_path: Path) -> None:
    sets = "eval.sets={test:{dataset:arithmetic,limit:4}}"
    trained(grpo, configured(*ENOUGH, sets, "eval.frequency=2"), tmp_path)
    assert asked == [0, 2, 4]
