"""How runs end, and from where they go on: stops in bad places, sweeps, checkpoints that are not theirs."""

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
from tests.saved import save_checkpoint
from tests.scripts import QUICK, begin, callback_of, configured, finish, rows, wait_for
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring import tracking
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.run.build import build
from torchgrpo.run.callbacks import Checkpoints, Evaluations
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.resume import find
from torchgrpo.run.training_run import Run

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
SETS = "eval.sets={held_out:{dataset:arithmetic,n:2,limit:4}}"


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (run_dir / "checkpoints").iterdir())


def test_a_stop_after_the_checkpoint_of_its_iteration_leaves_one_of_the_next(tmp_path: Path) -> None:
    class Stopping(Lockstep):
        def done(self, iteration: int, rollout: Rollout) -> None:
            super().done(iteration, rollout)
            self.stop.requested = iteration == 2 or self.stop.requested

    config = configured(*SMALL, "train.checkpoint_frequency=0")
    assert run_job(config, tmp_path, grpo.train, Stopping) == "interrupted"
    assert checkpoints(tmp_path) == [3]
    assert rows(tmp_path)[-1]["optimizer_step"] == 3


def test_a_stop_during_a_checkpoint_needs_no_other(tmp_path: Path) -> None:
    def train(working: Lockstep) -> None:
        checkpoints = callback_of(working, Checkpoints)
        write = checkpoints.write

        def stopped_in(run: Run, iteration: int) -> None:
            write(run, iteration)
            working.stop.requested = True

        checkpoints.write = stopped_in  # type: ignore[method-assign]
        grpo.train(working)

    config = configured(*SMALL, "train.checkpoint_frequency=2")
    assert run_job(config, tmp_path, train, Lockstep) == "interrupted"
    assert checkpoints(tmp_path) == [2]


def test_the_model_of_a_finished_run_is_freed_before_a_notebook_builds_the_next(tmp_path: Path) -> None:
    freed: list[bool] = []
    first, following = (tmp_path / name for name in ("first", "next"))

    class Next(Lockstep):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            freed.append(model() is None)

    def run_first() -> weakref.ref[torch.nn.Module]:
        first.mkdir()
        working = build(configured(*SMALL), first, Lockstep)
        working.push_weights()
        rollout = working.collect()
        working.advantage(rollout)
        working.learn(rollout)
        working.close("finished")
        return weakref.ref(working.learner.worker.model)

    gc.disable()  # the search that Python begins on its own may come late
    try:
        model = run_first()
        following.mkdir()
        build(configured(*SMALL), following, Next).close("finished")
    finally:
        gc.enable()
    assert freed == [True]


def test_ctrl_c_while_a_finished_run_closes_lets_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(working: Lockstep) -> None:
        close = working.collector.loop.close

        def interrupted() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            close()

        working.collector.loop.close = interrupted  # type: ignore[method-assign]
        grpo.train(working)

    with pytest.raises(KeyboardInterrupt, match="nothing of it is lost"):
        run_job(configured(*SMALL), tmp_path, train, Lockstep)
    assert "SIGINT: the run is over" in capfd.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "finished"
    assert (tmp_path / "report.html").exists()


def test_ctrl_c_while_a_failed_run_closes_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train(working: Lockstep) -> None:
        close = working.collector.loop.close

        def interrupted() -> None:
            close()
            os.kill(os.getpid(), signal.SIGINT)

        working.collector.loop.close = interrupted  # type: ignore[method-assign]
        raise RunError("of the first step")

    with pytest.raises(KeyboardInterrupt):
        run_job(configured(*SMALL), tmp_path, train, Lockstep)
    assert "finishing this iteration" not in capfd.readouterr().err


def test_checkpoints_in_the_way_of_a_new_run_are_named(tmp_path: Path) -> None:
    save_checkpoint(checkpoint_path(tmp_path, 7), {"iteration": 7}, keep=0)
    with pytest.raises(ConfigError, match=r"holds the checkpoints of an earlier run.*train\.resume=auto"):
        build(configured(*SMALL), tmp_path, Lockstep)


def test_an_evaluation_that_was_given_up_is_made_up_for(tmp_path: Path) -> None:
    config = configured(*SMALL, SETS, "eval.frequency=2", "train.resume=auto")

    def train(working: Lockstep) -> None:
        evaluation = callback_of(working, Evaluations).evaluation
        run_sets = evaluation.run

        def stopped_in(iteration: int, stopped: Callable[[], bool]) -> Any:
            working.stop.requested = iteration == 2
            return run_sets(iteration, stopped)

        evaluation.run = stopped_in  # type: ignore[method-assign]
        grpo.train(working)

    assert run_job(config, tmp_path, train, Lockstep) == "interrupted"
    assert checkpoints(tmp_path) == [2]
    assert run_job(config, tmp_path, grpo.train, Lockstep) == "finished"
    assert [row["iteration"] for row in rows(tmp_path) if "reward/mean" not in row] == [0, 2, 4]


@pytest.mark.long
def test_an_interrupted_sweep_begins_no_other_run(tmp_path: Path) -> None:
    process = begin(
        [
            *("grpo.py", "--config-name", "grpo_quickstart", "--multirun"),
            *(f"hydra.sweep.dir={tmp_path}", "train.seed=0,1", *QUICK, *SMALL[:2]),
            *("train.total_dialog_turns=1600000", "train.checkpoint_frequency=0"),
        ],
        stderr=subprocess.STDOUT,
    )
    wait_for(lambda: (tmp_path / "0" / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "SIGINT: finishing this iteration" in output
    assert "the sweep ends here" in output
    assert len(checkpoints(tmp_path / "0")) == 1
    assert not (tmp_path / "1").exists()
    assert "runs side by side: " in output and (tmp_path / "summary.csv").exists()


def test_each_script_goes_on_from_its_own_checkpoints(overlapped_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo_async\.py wrote it, .* go on with grpo_async\.py"):
        build(configured(*SMALL, f"train.resume={overlapped_run}"), tmp_path, Lockstep)


def test_auto_passes_over_what_is_not_this_run(
    lockstep_run: Path, overlapped_run: Path, tmp_path: Path
) -> None:
    """Among the sibling runs: of the other script, of another seed, torn, and no checkpoint of ours."""
    given = (*recorded_runs.SMALL, *recorded_runs.EVERY_SECOND)
    siblings = [tmp_path / "outputs" / "2026-01-01" / f"00-00-0{second}" for second in range(5)]
    for source, folder in zip((lockstep_run, overlapped_run), siblings, strict=False):
        shutil.copytree(source, folder)
    run_job(configured(*given, "train.seed=1"), siblings[2], grpo.train, Lockstep)
    ours = checkpoint_path(siblings[0], 4)
    for folder in siblings[3:]:
        checkpoint_path(folder, 1).mkdir(parents=True)
    torn, foreign = (checkpoint_path(folder, 1) / "run.pt" for folder in siblings[3:])
    torn.write_bytes((ours / "run.pt").read_bytes()[:1000])
    torch.save({"iteration": 1}, foreign)
    config = configured(*given, "train.resume=auto")
    assert find(config, siblings[0].parent / "09-00-00", Lockstep)[0].path == ours


@pytest.mark.parametrize(("keep", "left"), [(0, [100, 150]), (1, [150]), (3, [100, 150])])
def test_a_run_that_went_back_keeps_what_it_writes(keep: int, left: list[int], tmp_path: Path) -> None:
    for iteration in (100, 200, 300, 150):
        save_checkpoint(checkpoint_path(tmp_path, iteration), {"iteration": iteration}, keep=keep)
    assert checkpoints(tmp_path) == left


def test_a_run_that_cannot_be_built_closes_what_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def refuse(*_: object) -> None:
        raise ConfigError("no such tracker")

    monkeypatch.setattr(tracking, "make_tracker", refuse)
    monkeypatch.setattr(TransformersEngine, "close", lambda engine: closed.append("engine"))
    with pytest.raises(ConfigError, match="no such tracker"):
        build(configured(*SMALL), tmp_path, Lockstep)
    assert closed == ["engine"]
