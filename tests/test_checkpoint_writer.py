"""A checkpoint is written beside the run: named when whole, waited for at every end, and its failure ends the run."""

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
from tests.scripts import ROOT, configured, rows, start, wait_for, without_clocks
from torchgrpo.run.checkpoint_writer import CheckpointWriter
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import saved_tensors, write_tensors

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64", "train.checkpoint_frequency=1")
LIMIT_S = 600.0


class SlowLearner:
    """Its files are written when `may_write` is set. failure: what goes wrong then."""

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


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("writes "):
            thread.join(LIMIT_S)


def test_the_run_goes_on_and_the_name_comes_when_all_is_there(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig()), SlowLearner()
    writer.write(1, {"iteration": 1}, learner.save)
    assert writer.writing == "checkpoint_000001"
    assert names(tmp_path) == [".checkpoint_000001.writing"]
    writer.check()
    learner.may_write.set()
    writer.wait()
    assert writer.writing is None
    assert names(tmp_path) == ["checkpoint_000001"]


def test_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig()), SlowLearner()
    writer.write(1, {}, learner.save)
    threading.Timer(0.2, learner.may_write.set).start()
    writer.write(2, {}, learner.save)
    assert checkpoint_path(tmp_path, 1) in checkpoints(tmp_path)
    writer.wait()
    assert names(tmp_path) == ["checkpoint_000001", "checkpoint_000002"]


def test_without_a_thread_of_its_own_it_is_there_at_once(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig(async_checkpoint=False)), SlowLearner()
    learner.may_write.set()
    writer.write(1, {}, learner.save)
    assert writer.writing is None and names(tmp_path) == ["checkpoint_000001"]


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
    assert names(tmp_path) == []


def test_a_file_system_that_does_not_answer_is_named(tmp_path: Path) -> None:
    writer, learner = CheckpointWriter(tmp_path, TrainConfig(wait_timeout_s=0.2)), SlowLearner()
    writer.write(1, {}, learner.save)
    with pytest.raises(DeadlineError, match=r"waited 0 s \(train\.wait_timeout_s\) for .*checkpoint_000001"):
        writer.wait()
    writer.wait()  # it was given up
    learner.may_write.set()


def in_run(change: Callable[[Lockstep], None]) -> Callable[[Lockstep], None]:
    def train(working: Lockstep) -> None:
        change(working)
        grpo.train(working)

    return train


def test_every_checkpoint_is_what_the_run_was_at_that_time(tmp_path: Path) -> None:
    """Whether it waited for the files or not, to the bit; and steps went on meanwhile."""
    found: dict[str, Any] = {}
    for name in ("true", "false"):
        given = configured(*SMALL, "train.keep_checkpoints=0", f"train.async_checkpoint={name}")
        run_job(given, tmp_path / name, grpo.train, Lockstep)
        found[name] = [
            saved_tensors(checkpoint_path(tmp_path / name, iteration) / LEARNER) for iteration in (1, 2, 3, 4)
        ]
    assert without_clocks(rows(tmp_path / "true")) == without_clocks(rows(tmp_path / "false"))
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    first, last = found["true"][0], found["true"][-1]
    assert any(not torch.equal(tensor, last[name]) for name, tensor in first.items())


def test_a_run_steps_on_while_files_are_slow_and_its_end_waits(tmp_path: Path) -> None:
    may_write, steps_then = threading.Event(), []

    def slowed(working: Lockstep) -> None:
        save, learn = working.learner.save, working.learn

        def slow(folder: Path) -> Callable[[], None]:
            write = save(folder)
            return lambda: (may_write.wait(LIMIT_S), write())[1]

        def noted(batch: Any) -> None:
            learn(batch)
            steps_then.append(names(tmp_path) if (tmp_path / "checkpoints").exists() else [])
            if len(steps_then) == 4:
                threading.Timer(0.3, may_write.set).start()

        working.learner.save = slow  # type: ignore[method-assign]
        working.learn = noted  # type: ignore[method-assign]

    given = (*SMALL[:3], "train.checkpoint_frequency=3")
    assert run_job(configured(*given), tmp_path, in_run(slowed), Lockstep) == "finished"
    assert steps_then == [[], [], [], [".checkpoint_000003.writing"]]
    assert names(tmp_path) == ["checkpoint_000003", "checkpoint_000004"]


def test_a_failure_ends_the_run_at_the_next_iteration_and_names_itself(tmp_path: Path) -> None:
    def broken(working: Lockstep) -> None:
        def save(folder: Path) -> Callable[[], None]:
            def write() -> None:
                raise OSError(5, "Input/output error")

            return write

        done = working.done

        def after_the_thread(iteration: int, rollout: Any) -> None:
            wait_for_threads()
            done(iteration, rollout)

        working.learner.save = save  # type: ignore[method-assign]
        working.done = after_the_thread  # type: ignore[method-assign]

    given = (*SMALL[:2], "train.total_dialog_turns=1600", "train.checkpoint_frequency=2")
    with pytest.raises(OSError, match="Input/output error"):
        run_job(configured(*given), tmp_path, in_run(broken), Lockstep)
    assert len(rows(tmp_path)) in (2, 3)
    assert names(tmp_path) == []


def test_the_end_of_a_run_that_fails_waits_for_the_checkpoint_before(tmp_path: Path) -> None:
    def failing(working: Lockstep) -> None:
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
        run_job(configured(*SMALL), tmp_path, in_run(failing), Lockstep)
    assert names(tmp_path) == ["checkpoint_000001"]


@pytest.mark.long
def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    """With all tensors on disk and no name yet: to the bit the run that never stopped, and nothing is left over."""
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
    process = start(str(script), killed, *SMALL)
    metadata = killed / "checkpoints" / ".checkpoint_000003.writing" / "learner" / ".metadata"
    wait_for(metadata.exists, process)
    process.kill()
    process.communicate()
    assert names(killed) == [".checkpoint_000003.writing", "checkpoint_000001", "checkpoint_000002"]
    run_job(configured(*SMALL), whole, grpo.train, Lockstep)
    run_job(configured(*SMALL, "train.resume=auto"), killed, grpo.train, Lockstep)
    assert names(killed) == names(whole) == [f"checkpoint_{number:06d}" for number in (2, 3, 4)]
    assert_same_run(killed, whole, 4)
