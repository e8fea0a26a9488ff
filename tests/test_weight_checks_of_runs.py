"""Tests runs with lost pushes or wrong engines, which weight checks must detect.

Detection takes at most one step.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from config.schema.config import Config
from tests.script_runner import compose_run_config, read_metrics
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.weight_check import WeightCheck, WeightMismatch
from torchgrpo.run.build_run import build_run
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun

LARGE_BATCHES = ("env.num_envs=8", "env.repeats=8", "train.optim_batch_size=64", "train.total_dialog_turns=256")
SMALL_BATCHES = ("env.num_envs=2", "env.repeats=2", "train.optim_batch_size=4", "train.total_dialog_turns=16")


def aged_settings(age: int) -> tuple[str, ...]:
    """Returns settings with which `SlowLearnerRun` trains on tokens of this age."""
    return *LARGE_BATCHES, f"train.max_policy_age={age}"


class SlowLearnerRun(OverlappedRun):
    """Run that pushes only when as many batches wait as are allowed.

    The learner is slower than generation.
    """

    def push_weights(self) -> None:
        if 0 < self.monitor.iteration < self.last_iteration:
            deadline = time.monotonic() + 600
            config = self.config
            left = self.last_iteration - self.monitor.iteration
            waiting = min(config.train.max_policy_age, left) * config.optim_batch_groups
            while self.stream.buffer.groups_ready < waiting:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        super().push_weights()


def train_and_close(
    script: ModuleType, config: Config, folder: Path, on_built: Callable[[Any], None] = lambda working: None
) -> Any:
    working = build_run(config, folder, SlowLearnerRun if script is grpo_async else LockstepRun)
    on_built(working)
    try:
        script.train(working)
    finally:
        working.close("finished")
    return working


@pytest.fixture
def compared_versions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that records the policy versions whose fixed sequences are compared."""
    versions: list[int] = []
    compare = WeightCheck.compare

    def compare_and_record(check: WeightCheck, version: int) -> dict[str, float]:
        versions.append(version)
        return compare(check, version)

    monkeypatch.setattr(WeightCheck, "compare", compare_and_record)
    return versions


@pytest.mark.parametrize(
    ("size", "interval", "expected"),
    [
        (LARGE_BATCHES, 10, [0]),
        (LARGE_BATCHES, 2, [0, 2, 4]),
        (LARGE_BATCHES, 1, [0, 1, 2, 3, 4]),
        (SMALL_BATCHES, 10, [0, 1, 2, 3]),
    ],
)
def test_fixed_sequences_are_compared_when_due_and_where_too_little_was_sampled(
    size: tuple[str, ...], interval: int, expected: list[int], compared_versions: list[int], tmp_path: Path
) -> None:
    working = train_and_close(grpo, compose_run_config(*size, f"train.weight_check_every={interval}"), tmp_path)
    assert working.learner.optimizer_steps == 4
    assert compared_versions == expected


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that records some calls of engines, and simulates their sleep.

    A sleeping engine fails if it is used.
    """
    calls: list[str] = []

    def record_calls(name: str, method: Callable[..., Any] | None) -> Callable[..., Any]:
        def record_call(engine: TransformersEngine, *args: Any) -> Any:
            is_asleep = [call for call in calls if call in ("sleep", "wake")][-1:] == ["sleep"]
            assert (name == "wake") == is_asleep, f"{name} is called, and the engine {'sleeps' * is_asleep}"
            calls.append(name)
            return method(engine, *args) if method else None

        return record_call

    for name in ("score", "submit", "load"):
        monkeypatch.setattr(TransformersEngine, name, record_calls(name, getattr(TransformersEngine, name)))
    for name in ("sleep", "wake"):
        monkeypatch.setattr(TransformersEngine, name, record_calls(name, None))
    return calls


def take_turns(run: LockstepRun) -> None:
    run.rollout_components.weight_pusher.is_time_shared = True


DROPOUT = ("train_model.lora.enabled=true", "train_model.lora.dropout=0.2")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LARGE_BATCHES, [0]),
        ((*LARGE_BATCHES, "train.weight_check_every=2"), [0, 2, 4]),
        (SMALL_BATCHES, [0, 1, 2, 3, 4]),
        ((*LARGE_BATCHES, *DROPOUT), [0, 1, 2, 3, 4]),
    ],
    ids=["large", "every second push", "small", "dropout"],
)
def test_engines_in_turns_score_fixed_sequences_when_due(
    settings: tuple[str, ...],
    expected: list[int],
    compared_versions: list[int],
    engine_calls: list[str],
    tmp_path: Path,
) -> None:
    """Sampled tokens verify the other pushes.

    Where these tokens do not suffice, fixed sequences are compared before the engines sample.
    """
    train_and_close(grpo, compose_run_config(*settings), tmp_path, take_turns)
    assert compared_versions == expected
    assert [engine_calls.count(name) for name in ("load", "sleep", "wake", "score")] == [5, 4, 4, len(expected)]


@pytest.mark.parametrize("size", [LARGE_BATCHES, SMALL_BATCHES])
def test_a_lost_push_to_an_engine_in_turns_is_found(
    size: tuple[str, ...], engine_calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_pushes(2, monkeypatch)
    with pytest.raises(WeightMismatch, match=r"policy version 2.*Cause: old weights"):
        train_and_close(grpo, compose_run_config(*size), tmp_path, take_turns)
    assert engine_calls.count("wake") == 2


@pytest.mark.parametrize("age", [1, 2])
def test_a_batch_of_earlier_weights_has_fixed_sequences_compared(
    age: int, compared_versions: list[int], tmp_path: Path
) -> None:
    train_and_close(grpo_async, compose_run_config(*aged_settings(age)), tmp_path)
    assert compared_versions == [0, 1, 2, 3]


def test_dropout_of_an_adapter_is_no_mismatch(compared_versions: list[int], tmp_path: Path) -> None:
    """With dropout, fixed sequences verify a push instead of the step's log-probs."""
    dropout = ("train_model.lora.enabled=true", "train_model.lora.dropout=0.2", "optimizer.lr=1e-2")
    train_and_close(grpo, compose_run_config(*LARGE_BATCHES, *dropout, "optimizer.warmup_steps=0"), tmp_path)
    assert compared_versions == [0, 1, 2, 3]


def lose_pushes(pushes_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = TransformersEngine.load
    monkeypatch.setattr(
        TransformersEngine,
        "load",
        lambda engine, weights, version: (
            load(engine, weights, version) if version < pushes_from else setattr(engine, "policy_version", version)
        ),
    )


@pytest.mark.parametrize("size", [LARGE_BATCHES, SMALL_BATCHES])
def test_a_lost_push_is_found_at_the_latest_one_step_later(
    size: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_pushes(2, monkeypatch)
    built: list[Any] = []
    with pytest.raises(WeightMismatch, match=r"policy version 2.*Cause: old weights") as raised:
        train_and_close(grpo, compose_run_config(*size, "train.checkpoint_frequency=1"), tmp_path, built.append)
    assert built[0].learner.optimizer_steps <= 3
    assert f"the checkpoint before it is {tmp_path}/checkpoints/checkpoint_00000" in str(raised.value)


@pytest.mark.parametrize(("age", "optimizer"), [(1, ()), (2, ("optimizer.lr=1e-7",))])
def test_a_lost_push_of_an_overlapped_run_is_found(
    age: int, optimizer: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost push is found even if the update is smaller than the bounds."""
    lose_pushes(2, monkeypatch)
    built: list[Any] = []
    with pytest.raises(WeightMismatch, match=r"policy version 2: .*Cause: old weights"):
        train_and_close(grpo_async, compose_run_config(*aged_settings(age), *optimizer), tmp_path, built.append)
    assert built[0].learner.optimizer_steps == 2


def test_a_run_that_only_logs_a_mismatch_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_pushes(2, monkeypatch)
    working = train_and_close(grpo, compose_run_config(*LARGE_BATCHES, "train.on_mismatch=log"), tmp_path)
    assert working.learner.optimizer_steps == 4
    assert (
        "policy version 2: the engine differs" in (output := capsys.readouterr().err) and "Cause: old weights" in output
    )


def test_an_evaluation_is_of_weights_that_were_compared(compared_versions: list[int], tmp_path: Path) -> None:
    sets = "eval.sets={test:{dataset:arithmetic,limit:4}}"
    train_and_close(grpo, compose_run_config(*LARGE_BATCHES, sets, "eval.frequency=2"), tmp_path)
    assert compared_versions == [0, 2, 4]


def test_a_comparison_leaves_its_metrics(tmp_path: Path) -> None:
    began = time.perf_counter()
    train_and_close(grpo, compose_run_config(*LARGE_BATCHES, "train.weight_check_every=2"), tmp_path)
    elapsed = time.perf_counter() - began
    found = [row for row in read_metrics(tmp_path) if "weight_check/mean" in row]
    assert found and all(row["weight_check/max"] < 1e-4 and 0 < row["weight_check/seconds"] < elapsed for row in found)
