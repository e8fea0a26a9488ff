"""Tests that checkpoints are written in a thread beside the run.

A checkpoint gets its name when it is complete, every end of a run waits for it, and its failure ends the run.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo
from config.run_folder.checkpoints import checkpoint_path, checkpoints
from config.schema.errors import DeadlineError
from config.schema.train import TrainConfig
from tests.recorded_runs import assert_same_run
from tests.script_runner import ROOT, compose_run_config, read_metrics, start_script, wait_until, without_timings
from torchgrpo.run.checkpoint_writer import CheckpointWriter
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import saved_tensors, write_tensors

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64", "train.checkpoint_frequency=1")
LIMIT_S = 600.0


class SlowLearner:
    """Learner whose checkpoint files are written once `may_write` is set.

    failure: raised at the end of the write.
    """

    def __init__(self, failure: Exception | None = None) -> None:
        self.may_write = threading.Event()
        self.failure = failure

    def save(self, folder: Path) -> Callable[[], None]:
        def write() -> None:
            assert self.may_write.wait(LIMIT_S)
            write_tensors(folder, {"model.weight": torch.ones(3)})
            if self.failure is not None:
                raise self.failure

        return write


def checkpoint_names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("writes "):
            thread.join(LIMIT_S)


def test_the_run_goes_on_and_the_name_comes_when_all_is_there(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig()), SlowLearner()
    writer.write(1, {"iteration": 1}, learner.save)
    assert writer.pending_checkpoint == "checkpoint_000001"
    assert checkpoint_names(tmp_path) == [".checkpoint_000001.writing"]
    writer.check()
    learner.may_write.set()
    writer.wait()
    assert writer.pending_checkpoint is None
    assert checkpoint_names(tmp_path) == ["checkpoint_000001"]


def test_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig()), SlowLearner()
    writer.write(1, {}, learner.save)
    threading.Timer(0.2, learner.may_write.set).start()
    writer.write(2, {}, learner.save)
    assert checkpoint_path(tmp_path, 1) in checkpoints(tmp_path)
    writer.wait()
    assert checkpoint_names(tmp_path) == ["checkpoint_000001", "checkpoint_000002"]


def test_without_a_thread_of_its_own_it_is_there_at_once(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig(async_checkpoint=False)), SlowLearner()
    learner.may_write.set()
    writer.write(1, {}, learner.save)
    assert writer.pending_checkpoint is None and checkpoint_names(tmp_path) == ["checkpoint_000001"]


@pytest.mark.parametrize("call", ["check", "wait", "write"])
def test_what_went_wrong_is_raised_once_and_leaves_nothing(call: str, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, TrainConfig())
    learner = SlowLearner(OSError(28, "No space left on device"))
    learner.may_write.set()
    writer.write(1, {}, learner.save)
    wait_for_threads()
    calls = {"check": writer.check, "wait": writer.wait, "write": lambda: writer.write(2, {}, learner.save)}
    with pytest.raises(OSError, match="No space left"):
        calls[call]()
    writer.check()
    writer.wait()
    assert checkpoint_names(tmp_path) == []


def test_a_file_system_that_does_not_answer_is_named(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig(wait_timeout_s=0.2)), SlowLearner()
    writer.write(1, {}, learner.save)
    with pytest.raises(DeadlineError, match=r"waited 0 s \(train\.wait_timeout_s\) for .*checkpoint_000001"):
        writer.wait()
    writer.wait()  # returns at once, because the write was abandoned
    learner.may_write.set()


def train_after(change: Callable[[LockstepRun], None]) -> Callable[[LockstepRun], None]:
    def train(working: LockstepRun) -> None:
        change(working)
        grpo.train(working)

    return train


def test_every_checkpoint_is_what_the_run_was_at_that_time(tmp_path: Path) -> None:
    """Checkpoints are bit-identical whether or not the run waits for the files."""
    tensors_by_mode: dict[str, Any] = {}
    for name in ("true", "false"):
        config = compose_run_config(*SMALL, "train.keep_checkpoints=0", f"train.async_checkpoint={name}")
        run_job(config, tmp_path / name, grpo.train, LockstepRun)
        tensors_by_mode[name] = [
            saved_tensors(checkpoint_path(tmp_path / name, iteration) / LEARNER) for iteration in (1, 2, 3, 4)
        ]
    assert without_timings(read_metrics(tmp_path / "true")) == without_timings(read_metrics(tmp_path / "false"))
    for ours, theirs in zip(*tensors_by_mode.values(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    first, last = tensors_by_mode["true"][0], tensors_by_mode["true"][-1]
    assert any(not torch.equal(tensor, last[name]) for name, tensor in first.items())


def test_a_run_steps_on_while_files_are_slow_and_its_end_waits(tmp_path: Path) -> None:
    may_write, steps_then = threading.Event(), []

    def slow_down(working: LockstepRun) -> None:
        save, learn = working.learner.save, working.learn

        def slow(folder: Path) -> Callable[[], None]:
            write = save(folder)
            return lambda: (may_write.wait(LIMIT_S), write())[1]

        def learn_and_note(batch: Any) -> None:
            learn(batch)
            steps_then.append(checkpoint_names(tmp_path) if (tmp_path / "checkpoints").exists() else [])
            if len(steps_then) == 4:
                threading.Timer(0.3, may_write.set).start()

        working.learner.save = slow  # type: ignore[method-assign]
        working.learn = learn_and_note  # type: ignore[method-assign]

    config = (*SMALL[:3], "train.checkpoint_frequency=3")
    assert run_job(compose_run_config(*config), tmp_path, train_after(slow_down), LockstepRun) == "finished"
    assert steps_then == [[], [], [], [".checkpoint_000003.writing"]]
    assert checkpoint_names(tmp_path) == ["checkpoint_000003", "checkpoint_000004"]


def test_a_failure_ends_the_run_at_the_next_iteration_and_names_itself(tmp_path: Path) -> None:
    def break_writes(working: LockstepRun) -> None:
        def save(folder: Path) -> Callable[[], None]:
            def write() -> None:
                raise OSError(5, "Input/output error")

            return write

        done = working.end_iteration

        def after_the_thread(iteration: int, rollout: Any) -> None:
            wait_for_threads()
            done(iteration, rollout)

        working.learner.save = save  # type: ignore[method-assign]
        working.end_iteration = after_the_thread  # type: ignore[method-assign]

    config = (*SMALL[:2], "train.total_dialog_turns=1600", "train.checkpoint_frequency=2")
    with pytest.raises(OSError, match="Input/output error"):
        run_job(compose_run_config(*config), tmp_path, train_after(break_writes), LockstepRun)
    assert len(read_metrics(tmp_path)) in (2, 3)
    assert checkpoint_names(tmp_path) == []


def test_the_end_of_a_run_that_fails_waits_for_the_checkpoint_before(tmp_path: Path) -> None:
    def failing(working: LockstepRun) -> None:
        save, learn = working.learner.save, working.learn

        def slow(folder: Path) -> Callable[[], None]:
            write, soon = save(folder), threading.Event()
            threading.Timer(0.5, soon.set).start()
            return lambda: (soon.wait(LIMIT_S), write())[1]

        def fails_at_the_second(batch: Any) -> None:
            if working.learner.optimizer_steps == 1:
                raise RuntimeError("of the second step")
            learn(batch)

        working.learner.save = slow  # type: ignore[method-assign]
        working.learn = fails_at_the_second  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="of the second step"):
        run_job(compose_run_config(*SMALL), tmp_path, train_after(failing), LockstepRun)
    assert checkpoint_names(tmp_path) == ["checkpoint_000001"]


@pytest.mark.long
def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    """A kill before the checkpoint gets its name loses nothing else.

    The resumed run equals, to the bit, one that never stopped, and no files are left over.
    """
    whole, killed, script = tmp_path / "whole", tmp_path / "killed", tmp_path / "slow.py"
    script.write_text(
        f"import runpy, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport torchgrpo.training.worker as learner\n"
        "write = learner.write_tensors\n"
        "def write_tensors(folder, tensors, group):\n"
        "    write(folder, tensors)\n"
        "    if '000003' in str(folder):\n"
        "        time.sleep(1000)\n"
        "learner.write_tensors = write_tensors\n"
        "runpy.run_path('grpo.py', run_name='__main__')\n"
    )
    process = start_script(str(script), killed, *SMALL)
    metadata = killed / "checkpoints" / ".checkpoint_000003.writing" / "learner" / ".metadata"
    wait_until(metadata.exists, process)
    process.kill()
    process.communicate()
    assert checkpoint_names(killed) == [".checkpoint_000003.writing", "checkpoint_000001", "checkpoint_000002"]
    run_job(compose_run_config(*SMALL), whole, grpo.train, LockstepRun)
    run_job(compose_run_config(*SMALL, "train.resume=auto"), killed, grpo.train, LockstepRun)
    assert checkpoint_names(killed) == checkpoint_names(whole) == [f"checkpoint_{number:06d}" for number in (2, 3, 4)]
    assert_same_run(killed, whole, 4)
