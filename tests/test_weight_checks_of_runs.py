"""Whole runs in which pushes are lost or an engine is wrong: found at the latest one step later, whoever finds it."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from config.schema.config import Config
from tests.scripts import configured, rows
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.weight_check import WeightCheck, WeightMismatch
from torchgrpo.run.build import build
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped

ENOUGH = ("env.num_envs=8", "env.repeats=8", "train.optim_batch_size=64", "train.total_dialog_turns=256")
FEW = ("env.num_envs=2", "env.repeats=2", "train.optim_batch_size=4", "train.total_dialog_turns=16")


def aged(age: int) -> tuple[str, ...]:
    """So that `Behind` trains on what so many pushes are older than, if there were as many."""
    return *ENOUGH, f"train.max_policy_age={age}"


class Behind(Overlapped):
    """The learner is the slower one: as many batches as may wait for it before it pushes."""

    def push_weights(self) -> None:
        if 0 < self.monitor.iteration < self.last_iteration:
            deadline = time.monotonic() + 600
            config = self.config
            left = self.last_iteration - self.monitor.iteration
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
        working.close("finished")
    return working


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions whose fixed sequences were compared."""
    versions: list[int] = []
    compare = WeightCheck.compare

    def noted(check: WeightCheck, version: int) -> dict[str, float]:
        versions.append(version)
        return compare(check, version)

    monkeypatch.setattr(WeightCheck, "compare", noted)
    return versions


@pytest.mark.parametrize(
    ("size", "every", "expected"),
    [(ENOUGH, 10, [0]), (ENOUGH, 2, [0, 2, 4]), (ENOUGH, 1, [0, 1, 2, 3, 4]), (FEW, 10, [0, 1, 2, 3])],
)
def test_fixed_sequences_are_compared_when_due_and_where_too_little_was_sampled(
    size: tuple[str, ...], every: int, expected: list[int], compared: list[int], tmp_path: Path
) -> None:
    working = trained(grpo, configured(*size, f"train.weight_check_every={every}"), tmp_path)
    assert working.learner.optimizer_steps == 4
    assert compared == expected


@pytest.mark.parametrize("age", [1, 2])
def test_a_batch_of_earlier_weights_has_fixed_sequences_compared(
    age: int, compared: list[int], tmp_path: Path
) -> None:
    trained(grpo_async, configured(*aged(age)), tmp_path)
    assert compared == [0, 1, 2, 3]


def test_dropout_of_an_adapter_is_no_mismatch(compared: list[int], tmp_path: Path) -> None:
    """The step's forward pass has it, so that fixed sequences say whether a push arrived."""
    dropout = ("train_model.lora.enabled=true", "train_model.lora.dropout=0.2", "optimizer.lr=1e-2")
    trained(grpo, configured(*ENOUGH, *dropout, "optimizer.warmup_steps=0"), tmp_path)
    assert compared == [0, 1, 2, 3]


def lose(pushes_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = TransformersEngine.load
    monkeypatch.setattr(
        TransformersEngine,
        "load",
        lambda engine, weights, version: (
            load(engine, weights, version)
            if version < pushes_from
            else setattr(engine, "policy_version", version)
        ),
    )


@pytest.mark.parametrize("size", [ENOUGH, FEW])
def test_a_lost_push_is_found_at_the_latest_one_step_later(
    size: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(2, monkeypatch)
    built: list[Any] = []
    with pytest.raises(WeightMismatch, match=r"policy version 2.*Cause: old weights") as raised:
        trained(grpo, configured(*size, "train.checkpoint_frequency=1"), tmp_path, built.append)
    assert built[0].learner.optimizer_steps <= 3
    assert f"the checkpoint before it is {tmp_path}/checkpoints/checkpoint_00000" in str(raised.value)


@pytest.mark.parametrize(("age", "optimizer"), [(1, ()), (2, ("optimizer.lr=1e-7",))])
def test_so_is_an_overlapped_one(
    age: int, optimizer: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far within the bounds the update was."""
    lose(2, monkeypatch)
    built: list[Any] = []
    with pytest.raises(WeightMismatch, match=r"policy version 2: .*Cause: old weights"):
        trained(grpo_async, configured(*aged(age), *optimizer), tmp_path, built.append)
    assert built[0].learner.optimizer_steps == 2


def test_a_run_that_is_to_say_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(2, monkeypatch)
    working = trained(grpo, configured(*ENOUGH, "train.on_mismatch=say"), tmp_path)
    assert working.learner.optimizer_steps == 4
    assert (
        "policy version 2: the engine differs" in (said := capsys.readouterr().err)
        and "Cause: old weights" in said
    )


def test_an_evaluation_is_of_weights_that_were_compared(compared: list[int], tmp_path: Path) -> None:
    sets = "eval.sets={test:{dataset:arithmetic,limit:4}}"
    trained(grpo, configured(*ENOUGH, sets, "eval.frequency=2"), tmp_path)
    assert compared == [0, 2, 4]


def test_a_comparison_leaves_its_metrics(tmp_path: Path) -> None:
    began = time.perf_counter()
    trained(grpo, configured(*ENOUGH, "train.weight_check_every=2"), tmp_path)
    elapsed = time.perf_counter() - began
    found = [row for row in rows(tmp_path) if "weight_check/mean" in row]
    assert found and all(
        row["weight_check/largest"] < 1e-4 and 0 < row["weight_check/seconds"] < elapsed for row in found
    )
