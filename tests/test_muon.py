"""`optimizer=muon_adamw` in the whole loop: it runs, both halves move, and a resumed run is the same run."""

from pathlib import Path

import pytest
import torch

import grpo
from config.checkpoints import newest_checkpoint
from run.jobs import run_job
from run.lockstep import Lockstep
from tests.saved import saved_model
from tests.scripts import StoppingAfterTheFirst, configured, rows, without_clocks
from training.local_learner import LocalLearner
from training.optimizer import JointOptimizer

pytestmark = pytest.mark.long

MUON = (
    "optimizer=muon_adamw",
    "optimizer.muon_lr=2e-4",
    "env.num_envs=4",
    "env.repeats=4",
    "train.total_dialog_turns=48",
    "train.checkpoint_frequency=1",
)


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    path = newest_checkpoint(run_dir)
    assert path is not None
    return saved_model(path)


def test_three_iterations_stopped_after_one_and_resumed_are_three_iterations(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start: dict[str, torch.Tensor] = {}

    def noting_the_start(working: Lockstep) -> None:
        learner = working.run.learner
        assert isinstance(learner, LocalLearner)
        assert isinstance(learner.worker.optimizer, JointOptimizer)
        start.update({name: value.clone() for name, value in learner.worker.model.state_dict().items()})
        grpo.train(working)

    for folder in (whole, broken):
        folder.mkdir()
    run_job(configured(*MUON), whole, noting_the_start, Lockstep)
    run_job(configured(*MUON), broken, grpo.train, StoppingAfterTheFirst)
    assert len(rows(broken)) == 1
    run_job(configured(*MUON, "train.resume=auto"), broken, grpo.train, Lockstep)
    assert len(rows(whole)) == 3
    assert without_clocks(rows(broken)) == without_clocks(rows(whole))
    ends = weights_of(whole), weights_of(broken)
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
        assert not torch.equal(value, start[name]), f"{name} did not move"
