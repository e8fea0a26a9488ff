"""Tests ends and resumes of runs: stops at bad moments, sweeps, foreign checkpoints."""

import gc
import json
import os
import shutil
import signal
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo
from config.run_folder.checkpoints import checkpoint_path
from config.schema.errors import ConfigError, RunError
from tests import recorded_runs
from tests.checkpoint_helpers import save_checkpoint
from tests.script_runner import (
    QUICK,
    compose_run_config,
    find_callback,
    read_metrics,
    start_python,
    wait_for_output,
    wait_until,
)
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring import tracker_threads
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.run.build_run import build_run
from torchgrpo.run.callbacks import CheckpointCallback, EvaluationCallback
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.resume import find_checkpoint
from torchgrpo.run.training_run import Run

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
SETS = "eval.sets={held_out:{dataset:arithmetic,n:2,limit:4}}"


def checkpoint_iterations(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (run_dir / "checkpoints").iterdir())


def test_a_stop_after_the_checkpoint_of_its_iteration_leaves_one_of_the_next(tmp_path: Path) -> None:
    class StoppingRun(LockstepRun):
        def end_iteration(self, iteration: int, rollout: Rollout) -> None:
            super().end_iteration(iteration, rollout)
            self.stop.is_requested = iteration == 2 or self.stop.is_requested

    config = compose_run_config(*SMALL, "train.checkpoint_frequency=0")
    assert run_job(config, tmp_path, grpo.train, StoppingRun) == "interrupted"
    assert checkpoint_iterations(tmp_path) == [3]
    assert read_metrics(tmp_path)[-1]["optimizer_step"] == 3


def test_a_stop_during_a_checkpoint_needs_no_other(tmp_path: Path) -> None:
    def train(working: LockstepRun) -> None:
        checkpoint_callback = find_callback(working, CheckpointCallback)
        write = checkpoint_callback.write

        def stop_during(run: Run, iteration: int) -> None:
            write(run, iteration)
            working.stop.is_requested = True

        checkpoint_callback.write = stop_during  # type: ignore[method-assign]
        grpo.train(working)

    config = compose_run_config(*SMALL, "train.checkpoint_frequency=2")
    assert run_job(config, tmp_path, train, LockstepRun) == "interrupted"
    assert checkpoint_iterations(tmp_path) == [2]


def test_the_model_of_a_finished_run_is_freed_before_a_notebook_builds_the_next(tmp_path: Path) -> None:
    is_freed: list[bool] = []
    first, following = (tmp_path / name for name in ("first", "next"))

    class NextRun(LockstepRun):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            is_freed.append(model() is None)

    def run_first() -> weakref.ref[torch.nn.Module]:
        first.mkdir()
        working = build_run(compose_run_config(*SMALL), first, LockstepRun)
        working.push_weights()
        rollout = working.collect()
        working.advantage(rollout)
        working.learn(rollout)
        working.close("finished")
        return weakref.ref(working.learner.worker.model)

    gc.disable()  # an automatic garbage collection may come late
    try:
        model = run_first()
        following.mkdir()
        build_run(compose_run_config(*SMALL), following, NextRun).close("finished")
    finally:
        gc.enable()
    assert is_freed == [True]


def test_ctrl_c_while_a_finished_run_closes_lets_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train(working: LockstepRun) -> None:
        close = working.rollout_components.loop.close

        def close_with_signal() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            close()

        working.rollout_components.loop.close = close_with_signal  # type: ignore[method-assign]
        grpo.train(working)

    with pytest.raises(KeyboardInterrupt, match="nothing is lost"):
        run_job(compose_run_config(*SMALL), tmp_path, train, LockstepRun)
    assert "SIGINT: the run has ended" in capfd.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "finished"
    assert (tmp_path / "report.html").exists()


def test_ctrl_c_while_a_failed_run_closes_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train(working: LockstepRun) -> None:
        close = working.rollout_components.loop.close

        def close_with_signal() -> None:
            close()
            os.kill(os.getpid(), signal.SIGINT)

        working.rollout_components.loop.close = close_with_signal  # type: ignore[method-assign]
        raise RunError("of the first step")

    with pytest.raises(KeyboardInterrupt):
        run_job(compose_run_config(*SMALL), tmp_path, train, LockstepRun)
    assert "finishing this iteration" not in capfd.readouterr().err


def test_checkpoints_in_the_way_of_a_new_run_are_named(tmp_path: Path) -> None:
    save_checkpoint(checkpoint_path(tmp_path, 7), {"iteration": 7}, keep=0)
    with pytest.raises(ConfigError, match=r"would replace the checkpoints of an earlier run.*train\.resume=auto"):
        build_run(compose_run_config(*SMALL), tmp_path, LockstepRun)


def test_an_evaluation_that_was_given_up_is_made_up_for(tmp_path: Path) -> None:
    config = compose_run_config(*SMALL, SETS, "eval.frequency=2", "train.resume=auto")

    def train(working: LockstepRun) -> None:
        evaluation = find_callback(working, EvaluationCallback).evaluation
        run_sets = evaluation.run

        def stop_during(iteration: int, is_stopped: Callable[[], bool]) -> Any:
            working.stop.is_requested = iteration == 2
            return run_sets(iteration, is_stopped)

        evaluation.run = stop_during  # type: ignore[method-assign]
        grpo.train(working)

    assert run_job(config, tmp_path, train, LockstepRun) == "interrupted"
    assert checkpoint_iterations(tmp_path) == [2]
    assert run_job(config, tmp_path, grpo.train, LockstepRun) == "finished"
    assert [row["iteration"] for row in read_metrics(tmp_path) if "reward/mean" not in row] == [0, 2, 4]


@pytest.mark.long
def test_an_interrupted_sweep_begins_no_other_run(tmp_path: Path) -> None:
    process = start_python(
        [
            *("grpo.py", "--config-name", "grpo_quickstart", "--multirun"),
            *(f"hydra.sweep.dir={tmp_path}", "train.seed=0,1", *QUICK, *SMALL[:2]),
            *("train.total_dialog_turns=1600000", "train.checkpoint_frequency=0"),
        ],
        stderr=subprocess.STDOUT,
    )
    wait_until(lambda: (tmp_path / "0" / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 130, output
    assert "SIGINT: finishing this iteration" in output
    assert "the sweep ends here" in output
    assert len(checkpoint_iterations(tmp_path / "0")) == 1
    assert not (tmp_path / "1").exists()
    assert "runs side by side: " in output and (tmp_path / "summary.csv").exists()


def test_each_script_goes_on_from_its_own_checkpoints(overlapped_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the checkpoint is from grpo_async\.py, .* resume with grpo_async\.py"):
        build_run(compose_run_config(*SMALL, f"train.resume={overlapped_run}"), tmp_path, LockstepRun)


def test_auto_passes_over_what_is_not_this_run(lockstep_run: Path, overlapped_run: Path, tmp_path: Path) -> None:
    """Sibling runs of another script or seed and damaged checkpoints are passed over."""
    settings = (*recorded_runs.SMALL, *recorded_runs.EVERY_SECOND)
    siblings = [tmp_path / "outputs" / "2026-01-01" / f"00-00-0{second}" for second in range(5)]
    for source, folder in zip((lockstep_run, overlapped_run), siblings, strict=False):
        shutil.copytree(source, folder)
    run_job(compose_run_config(*settings, "train.seed=1"), siblings[2], grpo.train, LockstepRun)
    ours = checkpoint_path(siblings[0], 4)
    for folder in siblings[3:]:
        checkpoint_path(folder, 1).mkdir(parents=True)
    torn, foreign = (checkpoint_path(folder, 1) / "run.pt" for folder in siblings[3:])
    torn.write_bytes((ours / "run.pt").read_bytes()[:1000])
    torch.save({"iteration": 1}, foreign)
    config = compose_run_config(*settings, "train.resume=auto")
    assert find_checkpoint(config, siblings[0].parent / "09-00-00", LockstepRun)[0].path == ours


@pytest.mark.parametrize(("keep", "left"), [(0, [100, 150]), (1, [150]), (3, [100, 150])])
def test_a_run_that_went_back_keeps_what_it_writes(keep: int, left: list[int], tmp_path: Path) -> None:
    for iteration in (100, 200, 300, 150):
        save_checkpoint(checkpoint_path(tmp_path, iteration), {"iteration": iteration}, keep=keep)
    assert checkpoint_iterations(tmp_path) == left


def test_a_run_that_cannot_be_built_closes_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def refuse(*_: object) -> None:
        raise ConfigError("no such tracker")

    monkeypatch.setattr(tracker_threads, "make_tracker", refuse)
    monkeypatch.setattr(TransformersEngine, "close", lambda engine: closed.append("engine"))
    with pytest.raises(ConfigError, match="no such tracker"):
        build_run(compose_run_config(*SMALL), tmp_path, LockstepRun)
    assert closed == ["engine"]
