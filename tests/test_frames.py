"""Stack of an optimizer step, from `run.learn` to `optimizer.step`."""

import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.scripts import ROOT, configured
from torchgrpo.run.build import build
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.training.parameter_groups import ShardedAdamW


def test_five_frames_lie_between_learn_and_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends counted; frames of PyTorch in between are its own."""
    stacks: list[list[str]] = []
    step = ShardedAdamW.step

    def walked(optimizer: ShardedAdamW, *arguments: object) -> object:
        frame: FrameType | None = sys._getframe()
        names: list[str] = []
        while (
            frame is not None
            and frame.f_code.co_name != "test_five_frames_lie_between_learn_and_the_optimizer"
        ):
            if (
                Path(frame.f_code.co_filename).is_relative_to(ROOT)
                and ".venv" not in frame.f_code.co_filename
            ):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        stacks.append(names[::-1])
        return step(optimizer, *arguments)

    monkeypatch.setattr(ShardedAdamW, "step", walked)
    run = build(configured("env.num_envs=2", "env.repeats=4"), tmp_path, Lockstep)
    run.push_weights()
    rollout = run.collect()
    run.advantage(rollout)
    run.learn(rollout)
    run.close("finished")
    (stack,) = stacks
    assert stack[:-1] == ["Run.learn", "Learner.step", "LocalWorkers.call_all", "Worker.update"]
    assert len(stack) <= 5
