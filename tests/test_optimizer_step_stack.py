"""Checks the depth of the call stack from `run.learn` to `optimizer.step`."""

import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.script_runner import ROOT, compose_run_config
from torchgrpo.run.build_run import build_run
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.parameter_groups import ShardedAdamW


def test_five_frames_lie_between_learn_and_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count includes both ends and excludes frames of PyTorch."""
    stacks: list[list[str]] = []
    step = ShardedAdamW.step

    def record_stack(optimizer: ShardedAdamW, *arguments: object) -> object:
        frame: FrameType | None = sys._getframe()
        names: list[str] = []
        while frame is not None and frame.f_code.co_name != "test_five_frames_lie_between_learn_and_the_optimizer":
            if Path(frame.f_code.co_filename).is_relative_to(ROOT) and ".venv" not in frame.f_code.co_filename:
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        stacks.append(names[::-1])
        return step(optimizer, *arguments)

    monkeypatch.setattr(ShardedAdamW, "step", record_stack)
    run = build_run(compose_run_config("env.num_envs=2", "env.repeats=4"), tmp_path, LockstepRun)
    run.push_weights()
    rollout = run.collect()
    run.advantage(rollout)
    run.learn(rollout)
    run.close("finished")
    (stack,) = stacks
    assert stack[:-1] == ["Run.learn", "Learner.step", "LocalWorkers.call_all", "Worker.update"]
    assert len(stack) <= 5
