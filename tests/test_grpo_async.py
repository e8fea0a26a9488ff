"""Tests the overlapped script end to end: age bound, equality at age 0, kills.

At age 0 the overlapped run equals lockstep.
"""

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
from tests.log_capture import LogCapture
from tests.processes import engine_pids
from tests.rollout.pool_engines import CallTransfer
from tests.script_runner import (
    compose_run_config,
    find_callback,
    read_metrics,
    start_script,
    wait_for_output,
    wait_until,
    without_timings,
)
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.transports import shared_memory
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.run.build_run import build_run
from torchgrpo.run.callbacks import EvaluationCallback
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=160")


def test_at_age_zero_the_metrics_are_those_of_lockstep(tmp_path: Path) -> None:
    lockstep, overlapped = tmp_path / "lockstep", tmp_path / "overlapped"
    run_job(compose_run_config(*SMALL), lockstep, grpo.train, LockstepRun)
    run_job(compose_run_config(*SMALL, "train.max_policy_age=0"), overlapped, grpo_async.train, OverlappedRun)
    pairs = list(zip(without_timings(read_metrics(lockstep)), without_timings(read_metrics(overlapped)), strict=True))
    assert len(pairs) == 10
    for ours, theirs in pairs:
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(("stale", "max_age", "frequency"), [("drop", 1, 1), ("wait", 2, 3)])
def test_no_token_is_older_than_the_bound(stale: str, max_age: int, frequency: int, tmp_path: Path) -> None:
    config = compose_run_config(
        *SMALL,
        f"train.max_policy_age={max_age}",
        f"train.stale_groups={stale}",
        f"train.weight_update_frequency={frequency}",
    )
    oldest: list[int] = []

    class AgeRecorder(OverlappedRun):
        def learn(self, rollout: Rollout) -> None:
            batch = rollout.batch
            assert self.stream.buffer.keep_order == (stale == "wait")
            ages = self.rollout_components.weight_pusher.version - batch.policy_version[batch.mask]
            oldest.append(int(ages.max()))
            super().learn(rollout)

    run_job(config, tmp_path, grpo_async.train, AgeRecorder)
    assert len(oldest) == 10
    assert 1 <= max(oldest) <= max_age
    metrics = read_metrics(tmp_path)
    assert metrics[-1]["policy_version"] == 9 // frequency
    for row, age in zip(metrics, oldest, strict=True):
        assert row["age/max"] == age
        counts = [row[f"age/histogram/{k}"] for k in range(age + 1)]
        weighted = sum(k * count for k, count in enumerate(counts))
        assert row["age/mean"] == pytest.approx(weighted / sum(counts))
        assert 0.0 <= row["idle/learner"] <= 1.0 and 0.0 <= row["idle/engines"] <= 1.0
        assert 0.0 < row[f"ess/age_{max_age}"] <= 1.0 + 1e-6
        assert row["logprob_diff/p50"] <= row["logprob_diff/p99"] <= row["logprob_diff/max"]


@pytest.mark.parametrize("update", ["abort", "wait"])
def test_other_ways_of_updating_train_too(update: str, tmp_path: Path) -> None:
    config = compose_run_config(*SMALL, "train.max_policy_age=2", f"inference_model.update={update}")
    working = build_run(config, tmp_path, OverlappedRun)
    grpo_async.train(working)
    assert len(read_metrics(tmp_path)) == 10
    assert working.stream.groups_in_flight == 0
    working.close("finished")


def test_the_trainers_log_probs_are_those_before_the_first_of_several_epochs(tmp_path: Path) -> None:
    config = compose_run_config(
        *SMALL,
        "train.total_dialog_turns=48",
        "train.epochs=2",
        "policy.old_log_prob=trainer",
        "policy.mismatch=truncate",
        "optimizer.lr=1e-2",
    )
    run_job(config, tmp_path, grpo_async.train, OverlappedRun)
    metrics = read_metrics(tmp_path)
    assert len(metrics) == 6
    for first, second in zip(metrics[::2], metrics[1::2], strict=True):
        assert first["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert second["ratio/max"] > 1.01
        assert first["logprob_diff/max"] == second["logprob_diff/max"]


def test_an_error_in_the_rollout_thread_is_raised_in_the_trainer(tmp_path: Path) -> None:
    working = build_run(compose_run_config(*SMALL), tmp_path, OverlappedRun)

    def raise_in_reward(completions: Any, examples: Any) -> Any:
        raise ZeroDivisionError("a bug in my reward")

    working.rollout_components.rewards.submit = raise_in_reward  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError, match="bug in my reward") as raised:
        grpo_async.train(working)
    assert "raise_in_reward" in [frame.name for frame in raised.traceback]
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    assert working.stream.groups_in_flight == 0
    working.close("failed")


def test_a_silent_engine_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    working = build_run(compose_run_config(*SMALL), tmp_path, OverlappedRun)
    working.push_weights()  # the weight check of the first push needs a working engine, and time on a busy machine
    working.stream.timeout = 5.0
    working.rollout_components.engine.step = lambda timeout: time.sleep(0.05) or []  # never finishes
    take_batch, deadline = working.take_batch, time.monotonic() + 300

    def take_batch_with_groups_in_flight() -> Rollout:
        while working.stream.groups_in_flight < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return take_batch()

    working.take_batch = take_batch_with_groups_in_flight  # type: ignore[method-assign]
    with pytest.raises(
        TimeoutError, match=r"the learner waited .* for the engines: the batch has 0 of 4 groups, 4 are in"
    ):
        grpo_async.train(working)
    working.close("failed")


def test_an_engine_silent_from_the_start_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    working = build_run(compose_run_config(*SMALL, "train.wait_timeout_s=2"), tmp_path, OverlappedRun)
    working.rollout_components.engine.step = lambda timeout: time.sleep(0.05) or []
    with pytest.raises(TimeoutError, match="the rollout waited 2 s for the engine to finish any of 2 of 2 requests"):
        grpo_async.train(working)
    working.close("failed")


def use_fake_transfer(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda version: None) -> None:
    """Replaces shared memory by a fake native transfer beside a copy in shared memory."""
    direct = CallTransfer("load", before)
    monkeypatch.setattr(shared_memory, "make_transport", lambda plan: WeightTransport(SharedMemory(), direct))


def kill_the_engine(other_pids: set[int]) -> None:
    (victim,) = set(engine_pids()) - other_pids
    os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize(("frequency", "versions"), [(1, 10), pytest.param(10, 1, marks=pytest.mark.long)])
def test_an_engine_lost_between_two_pushes_comes_back_with_the_present_version(
    frequency: int,
    versions: int,
    local_ray: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_capture: LogCapture,
) -> None:
    """A killed engine's replacement loads the last pushed version by itself.

    The only engine gets SIGKILL while the learner's weights are newer than that version. No push comes early, and every
    later push is compared.
    """
    use_fake_transfer(monkeypatch)
    other_pids = set(engine_pids())
    config = compose_run_config(
        *SMALL, "ray.enabled=true", f"train.weight_update_frequency={frequency}", "train.wait_timeout_s=600"
    )

    def train(schedule: OverlappedRun) -> None:
        learn = schedule.learn

        def kill_and_run(rollout: Rollout) -> None:
            batch = rollout.batch
            ages = schedule.rollout_components.weight_pusher.version - batch.policy_version[batch.mask]
            assert 0 <= int(ages.min()) <= int(ages.max()) <= 1
            if schedule.learner.optimizer_steps == 2:
                kill_the_engine(other_pids)
            learn(rollout)

        schedule.learn = kill_and_run  # type: ignore[method-assign]
        grpo_async.train(schedule)

    run_job(config, tmp_path, train, OverlappedRun)
    metrics = read_metrics(tmp_path)
    assert [row["policy_version"] for row in metrics] == [row // frequency for row in range(10)]
    assert metrics[-1]["policy_version"] == versions - 1
    assert log_capture.text.count("engine 0 (CPU) is back") == 1


@pytest.mark.long
@pytest.mark.parametrize(("script", "schedule"), [(grpo, LockstepRun), (grpo_async, OverlappedRun)])
def test_an_engine_lost_in_a_push_comes_back_with_it(
    script: ModuleType,
    schedule: type[LockstepRun] | type[OverlappedRun],
    local_ray: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_capture: LogCapture,
) -> None:
    """A killed engine's replacement loads the copy of the push.

    The engine gets SIGKILL as the native transfer of version 3 begins; the copy is loaded before the weight
    check.
    """

    def before(version: int) -> None:
        if version == 3:
            kill_the_engine(other_pids)

    use_fake_transfer(monkeypatch, before)
    other_pids = set(engine_pids())
    config = compose_run_config(*SMALL, "ray.enabled=true", "train.wait_timeout_s=600")
    run_job(config, tmp_path, script.train, schedule)
    metrics = read_metrics(tmp_path)
    assert [row["policy_version"] for row in metrics] == list(range(10))
    assert "was lost during load, which needs every engine" in log_capture.text
    assert "engine 0 (CPU) is back, with policy version 3" in log_capture.text


@pytest.mark.long
def test_an_engine_lost_in_an_evaluation_gets_its_weights_there(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_capture: LogCapture
) -> None:
    """A replaced engine gets its weights during an evaluation.

    The learner waits for the evaluation, and the evaluation waits for the only engine; the engine waits for
    neither.
    """
    use_fake_transfer(monkeypatch)
    other_pids = set(engine_pids())
    config = compose_run_config(
        *SMALL,
        "ray.enabled=true",
        "inference_model.request_timeout_s=600",
        "eval.sets={held_out:{dataset:arithmetic,n:2,limit:8}}",
    )

    def train(schedule: OverlappedRun) -> None:
        evaluation = find_callback(schedule, EvaluationCallback).evaluation
        run_sets = evaluation.run

        def kill_and_run(iteration: int, is_stopped: Callable[[], bool]) -> Any:
            if iteration == 10:
                kill_the_engine(other_pids)
            return run_sets(iteration, is_stopped)

        evaluation.run = kill_and_run  # type: ignore[method-assign]
        grpo_async.train(schedule)

    assert run_job(config, tmp_path, train, OverlappedRun) == "finished"
    assert "engine 0 (CPU) is back, with policy version 10" in log_capture.text
    assert [row["iteration"] for row in read_metrics(tmp_path) if "reward/mean" not in row] == [0, 10]


@pytest.mark.long
def test_ctrl_c_ends_in_seconds_with_a_checkpoint(tmp_path: Path) -> None:
    endless = ("train.total_dialog_turns=1600000", "train.checkpoint_frequency=0", "train.max_policy_age=2")
    process = start_script("grpo_async.py", tmp_path, *SMALL[:2], *endless)
    wait_until(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert "interrupted" in output
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
