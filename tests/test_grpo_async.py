"""The overlapped script, whole: equal to lockstep at age 0, bounded above it, nothing lost by a kill."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from tests.logged import Logged
from tests.processes import engine_processes
from tests.rollout.pool_engines import HandCarried
from tests.scripts import callback_of, configured, finish, rows, start, wait_for, without_clocks
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.weights.host_copy import Transport
from torchgrpo.rollout.weights.transports import shared_memory
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.run.build import build
from torchgrpo.run.callbacks import Evaluations
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=160")


def test_at_age_zero_the_metrics_are_those_of_lockstep(tmp_path: Path) -> None:
    lockstep, overlapped = tmp_path / "lockstep", tmp_path / "overlapped"
    run_job(configured(*SMALL), lockstep, grpo.train, Lockstep)
    run_job(configured(*SMALL, "train.max_policy_age=0"), overlapped, grpo_async.train, Overlapped)
    pairs = list(zip(without_clocks(rows(lockstep)), without_clocks(rows(overlapped)), strict=True))
    assert len(pairs) == 10
    for ours, theirs in pairs:
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(("stale", "max_age", "frequency"), [("drop", 1, 1), ("wait", 2, 3)])
def test_no_token_is_older_than_the_bound(stale: str, max_age: int, frequency: int, tmp_path: Path) -> None:
    config = configured(
        *SMALL,
        f"train.max_policy_age={max_age}",
        f"train.stale_groups={stale}",
        f"train.weight_update_frequency={frequency}",
    )
    oldest: list[int] = []

    class Checking(Overlapped):
        def learn(self, rollout: Rollout) -> None:
            batch = rollout.batch
            assert self.stream.buffer.keep_order == (stale == "wait")
            ages = self.collector.weights.version - batch.policy_version[batch.mask]
            oldest.append(int(ages.max()))
            super().learn(rollout)

    run_job(config, tmp_path, grpo_async.train, Checking)
    assert len(oldest) == 10
    assert 1 <= max(oldest) <= max_age
    metrics = rows(tmp_path)
    assert metrics[-1]["policy_version"] == 9 // frequency
    for row, age in zip(metrics, oldest, strict=True):
        assert row["age/max"] == age
        counts = [row[f"age/histogram/{k}"] for k in range(age + 1)]
        weighted = sum(k * count for k, count in enumerate(counts))
        assert row["age/mean"] == pytest.approx(weighted / sum(counts))
        assert 0.0 <= row["idle/learner"] <= 1.0 and 0.0 <= row["idle/engines"] <= 1.0
        assert 0.0 < row[f"ess/age_{max_age}"] <= 1.0 + 1e-6
        assert row["mismatch/p50"] <= row["mismatch/p99"] <= row["mismatch/max"]


@pytest.mark.parametrize("update", ["abort", "wait"])
def test_other_ways_of_updating_train_too(update: str, tmp_path: Path) -> None:
    config = configured(*SMALL, "train.max_policy_age=2", f"inference_model.update={update}")
    working = build(config, tmp_path, Overlapped)
    grpo_async.train(working)
    assert len(rows(tmp_path)) == 10
    assert working.stream.groups_in_flight == 0
    working.close("finished")


def test_the_trainers_log_probs_are_those_before_the_first_of_several_epochs(tmp_path: Path) -> None:
    config = configured(
        *SMALL,
        "train.total_dialog_turns=48",
        "train.epochs=2",
        "policy.old_log_prob=trainer",
        "policy.mismatch=truncate",
        "optimizer.lr=1e-2",
    )
    run_job(config, tmp_path, grpo_async.train, Overlapped)
    metrics = rows(tmp_path)
    assert len(metrics) == 6
    for first, second in zip(metrics[::2], metrics[1::2], strict=True):
        assert first["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert second["ratio/max"] > 1.01
        assert first["mismatch/max"] == second["mismatch/max"]


def test_an_error_in_the_rollout_thread_is_raised_in_the_trainer(tmp_path: Path) -> None:
    working = build(configured(*SMALL), tmp_path, Overlapped)

    def broken(completions: Any, examples: Any) -> Any:
        raise ZeroDivisionError("a bug in my reward")

    working.collector.rewards.submit = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError, match="bug in my reward") as raised:
        grpo_async.train(working)
    assert "broken" in [frame.name for frame in raised.traceback]
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    assert working.stream.groups_in_flight == 0
    working.close("failed")


def test_a_silent_engine_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    working = build(configured(*SMALL, "train.wait_timeout_s=5"), tmp_path, Overlapped)
    working.push_weights()  # the start's check decodes
    working.collector.engine.step = lambda timeout: time.sleep(0.05) or []  # an engine that never finishes
    with pytest.raises(
        TimeoutError, match=r"the learner waited .* for the engines: it has 0 of 4 groups, 4 are in"
    ):
        grpo_async.train(working)
    working.close("failed")


def test_so_is_one_that_is_silent_from_the_start(tmp_path: Path) -> None:
    working = build(configured(*SMALL, "train.wait_timeout_s=2"), tmp_path, Overlapped)
    working.collector.engine.step = lambda timeout: time.sleep(0.05) or []
    with pytest.raises(
        TimeoutError, match="the rollout waited 2 s for the engine to finish any of 2 of 2 requests"
    ):
        grpo_async.train(working)
    working.close("failed")


def hand_carried(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda version: None
) -> None:
    """A pretended native transfer in the place of shared memory, which holds the copy beside it."""
    direct = HandCarried("load", before)
    monkeypatch.setattr(shared_memory, "make_transport", lambda plan: Transport(SharedMemory(), direct))


def kill_the_engine(others: set[int]) -> None:
    (victim,) = set(engine_processes()) - others
    os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize(("frequency", "versions"), [(1, 10), pytest.param(10, 1, marks=pytest.mark.long)])
def test_an_engine_lost_between_two_pushes_comes_back_with_the_present_version(
    frequency: int,
    versions: int,
    local_ray: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
) -> None:
    """SIGKILL of the only engine while the learner's weights are newer than the last version: the new one loads that
    version by itself, nobody pushes before its time, and every later push is compared."""
    hand_carried(monkeypatch)
    others = set(engine_processes())
    config = configured(
        *SMALL, "ray.enabled=true", f"train.weight_update_frequency={frequency}", "train.wait_timeout_s=600"
    )

    def train(schedule: Overlapped) -> None:
        learn = schedule.learn

        def killing(rollout: Rollout) -> None:
            batch = rollout.batch
            ages = schedule.collector.weights.version - batch.policy_version[batch.mask]
            assert 0 <= int(ages.min()) <= int(ages.max()) <= 1
            if schedule.learner.optimizer_steps == 2:
                kill_the_engine(others)
            learn(rollout)

        schedule.learn = killing  # type: ignore[method-assign]
        grpo_async.train(schedule)

    run_job(config, tmp_path, train, Overlapped)
    metrics = rows(tmp_path)
    assert [row["policy_version"] for row in metrics] == [row // frequency for row in range(10)]
    assert metrics[-1]["policy_version"] == versions - 1
    assert logged.text.count("engine 0 (CPU) is back") == 1


@pytest.mark.long
@pytest.mark.parametrize(("script", "schedule"), [(grpo, Lockstep), (grpo_async, Overlapped)])
def test_an_engine_lost_in_a_push_comes_back_with_it(
    script: ModuleType,
    schedule: type[Lockstep] | type[Overlapped],
    local_ray: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
) -> None:
    """SIGKILL as the native transfer of version 3 begins: the new engine loads the copy, before the weight check."""

    def before(version: int) -> None:
        if version == 3:
            kill_the_engine(others)

    hand_carried(monkeypatch, before)
    others = set(engine_processes())
    config = configured(*SMALL, "ray.enabled=true", "train.wait_timeout_s=600")
    run_job(config, tmp_path, script.train, schedule)
    metrics = rows(tmp_path)
    assert [row["policy_version"] for row in metrics] == list(range(10))
    assert "was lost during load, which needs every engine" in logged.text
    assert "engine 0 (CPU) is back, with policy version 3" in logged.text


@pytest.mark.long
def test_an_engine_lost_in_an_evaluation_gets_its_weights_there(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    """The learner waits for the evaluation, and that for the only engine, which needs neither of them."""
    hand_carried(monkeypatch)
    others = set(engine_processes())
    config = configured(
        *SMALL,
        "ray.enabled=true",
        "inference_model.request_timeout_s=600",
        "eval.sets={held_out:{dataset:arithmetic,n:2,limit:8}}",
    )

    def train(schedule: Overlapped) -> None:
        evaluation = callback_of(schedule, Evaluations).evaluation
        run_sets = evaluation.run

        def killing(iteration: int, stopped: Callable[[], bool]) -> Any:
            if iteration == 10:
                kill_the_engine(others)
            return run_sets(iteration, stopped)

        evaluation.run = killing  # type: ignore[method-assign]
        grpo_async.train(schedule)

    assert run_job(config, tmp_path, train, Overlapped) == "finished"
    assert "engine 0 (CPU) is back, with policy version 10" in logged.text
    assert [row["iteration"] for row in rows(tmp_path) if "reward/mean" not in row] == [0, 10]


@pytest.mark.long
def test_ctrl_c_ends_in_seconds_with_a_checkpoint(tmp_path: Path) -> None:
    endless = ("train.total_dialog_turns=1600000", "train.checkpoint_frequency=0", "train.max_policy_age=2")
    process = start("grpo_async.py", tmp_path, *SMALL[:2], *endless)
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 0, output
    assert "interrupted" in output
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
