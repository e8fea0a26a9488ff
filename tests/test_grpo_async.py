"""The overlapped script, whole: equal to lockstep at age 0, bounded above it, nothing lost by a kill."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import grpo
import grpo_async
import run.engines
from config.schema import Config
from rollout.engines.pool import RayPool
from rollout.weights.outgoing import Outgoing
from run.build import build
from run.jobs import run_job
from run.lockstep import Lockstep
from run.overlapped import Overlapped
from tests.processes import engine_processes
from tests.scripts import configured, finish, rows, start, wait_for, without_clocks

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=160")


def test_at_age_zero_the_metrics_are_those_of_lockstep(tmp_path: Path) -> None:
    lockstep, overlapped = tmp_path / "lockstep", tmp_path / "overlapped"
    for folder in (lockstep, overlapped):
        folder.mkdir()
    run_job(configured(*SMALL), lockstep, grpo.train, Lockstep)
    run_job(configured(*SMALL, "train.max_policy_age=0"), overlapped, grpo_async.train, Overlapped)
    pairs = list(zip(without_clocks(rows(lockstep)), without_clocks(rows(overlapped)), strict=True))
    assert len(pairs) == 10
    for ours, theirs in pairs:
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("stale", ["wait", "drop"])
@pytest.mark.parametrize(("max_age", "frequency"), [(1, 1), (2, 3)])
def test_no_token_is_older_than_the_bound(stale: str, max_age: int, frequency: int, tmp_path: Path) -> None:
    config = configured(
        *SMALL,
        f"train.max_policy_age={max_age}",
        f"train.stale_groups={stale}",
        f"train.weight_update_frequency={frequency}",
    )
    oldest: list[int] = []

    def train(config: Config, parts: Parts) -> None:
        step = parts.learner.step

        def checked(batch: Any) -> Any:
            ages = parts.weights.version - batch["policy_version"][batch["mask"]]
            oldest.append(int(ages.max()))
            return step(batch)

        parts.learner.step = checked
        grpo_async.train(config, parts)

    run_job(config, tmp_path, train)
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
    parts = build(config, tmp_path)
    grpo_async.train(config, parts)
    assert len(rows(tmp_path)) == 10
    assert len(parts.rollouts.env.in_flight) == 0
    parts.close("finished")


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
    parts = build(configured(*SMALL), tmp_path)

    def broken(completions: Any, examples: Any) -> Any:
        raise ZeroDivisionError("a bug in my reward")

    parts.rewards.submit = broken
    with pytest.raises(ZeroDivisionError, match="bug in my reward") as raised:
        grpo_async.train(parts.config, parts)
    assert "broken" in [frame.name for frame in raised.traceback]
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    assert len(parts.rollouts.env.in_flight) == 0
    parts.close("failed")


def test_a_silent_engine_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    parts = build(configured(*SMALL, "train.wait_timeout_s=5"), tmp_path)
    parts.rollouts.policy.engine.step = lambda timeout: (
        time.sleep(0.05) or []
    )  # an engine that never finishes
    with pytest.raises(
        TimeoutError, match=r"the learner waited .* for the engines: it has 0 of 4 groups, 4 are in"
    ):
        grpo_async.train(parts.config, parts)
    parts.close("failed")


class HandCarried:
    """In the place of `nccl`, which needs GPUs: the tensors are arguments of a call, and no handle keeps them."""

    name = "nccl"

    def __init__(self, pool: RayPool) -> None:
        self.pool = pool

    def push(self, weights: Outgoing, version: int) -> None:
        named = [(name, tensor.clone()) for name, tensor in weights]
        arguments = {"weights": named, "version": version}
        self.pool.call_each("load_weights", [arguments] * len(self.pool.members))
        self.pool.note_push(version, frozenset(name for name, _ in named))


@pytest.mark.parametrize(("frequency", "versions"), [(1, 10), (10, 2)])
def test_an_engine_that_is_lost_gets_weights_that_only_the_learner_has(
    frequency: int,
    versions: int,
    local_ray: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SIGKILL of the only engine: it waits for weights, the learner for groups, so the learner pushes again.

    Between two pushes the learner's weights are newer than the last version: that push is one more version. With
    10 batches a version there is no other: the engine has at most six of them ready when it is lost.
    """
    monkeypatch.setattr(run.engines, "_transport", lambda config, engine, plan: HandCarried(engine))
    others = set(engine_processes())
    config = configured(
        *SMALL, "ray.enabled=true", f"train.weight_update_frequency={frequency}", "train.wait_timeout_s=120"
    )

    def train(config: Config, parts: Parts) -> None:
        step = parts.learner.step

        def killing(batch: Any) -> Any:
            ages = parts.weights.version - batch["policy_version"][batch["mask"]]
            assert 0 <= int(ages.min()) <= int(ages.max()) <= 1
            if parts.learner.optimizer_steps == 2:
                (victim,) = set(engine_processes()) - others
                os.kill(victim, signal.SIGKILL)
            return step(batch)

        parts.learner.step = killing
        grpo_async.train(config, parts)

    run_job(config, tmp_path, train, overlapped=True)
    metrics = rows(tmp_path)
    assert len(metrics) == 10
    assert metrics[-1]["policy_version"] == versions - 1
    assert "engine 0 (CPU) is back" in caplog.text


def test_an_engine_that_is_lost_in_an_evaluation_gets_its_weights_there(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The learner waits for the evaluation, the evaluation for the only engine, and that one for the learner."""
    monkeypatch.setattr(run.engines, "_transport", lambda config, engine, plan: HandCarried(engine))
    others = set(engine_processes())
    config = configured(
        *SMALL,
        "ray.enabled=true",
        "inference_model.request_timeout_s=120",
        "eval.sets={held_out:{dataset:arithmetic,n:2,limit:8}}",
    )

    def train(config: Config, parts: Parts) -> None:
        evaluate = parts.evaluate

        def killing(iteration: int) -> None:
            if iteration == 10:
                (victim,) = set(engine_processes()) - others
                os.kill(victim, signal.SIGKILL)
            evaluate(iteration)

        parts.evaluate = killing  # type: ignore[method-assign]
        grpo_async.train(config, parts)

    assert run_job(config, tmp_path, train, overlapped=True) == "finished"
    assert "engine 0 (CPU) is back" in caplog.text
    assert [row["iteration"] for row in rows(tmp_path) if "reward/mean" not in row] == [0, 10]


def test_ctrl_c_ends_in_seconds_with_a_checkpoint(tmp_path: Path) -> None:
    process = start(
        "grpo_async.py",
        tmp_path,
        *SMALL[:2],
        "train.total_dialog_turns=1600000",
        "train.checkpoint_frequency=0",
        "train.max_policy_age=2",
    )
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = finish(process, timeout=60)
    assert process.returncode == 0, output
    assert "interrupted" in output
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
