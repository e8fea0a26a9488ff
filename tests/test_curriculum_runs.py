"""Runs with a curriculum: the same bits after a kill as without one, and metrics that the table holds."""

import shutil
from pathlib import Path

import pytest
import torch

import grpo
import grpo_async
from config.checkpoints import checkpoint_path
from config.errors import ConfigError
from monitoring.metric_table import pattern_of
from monitoring.metrics import without_clocks
from run.jobs import run_job
from run.lockstep import Lockstep
from tests.scripts import SCHEDULE_OF, configured, rows
from training.checkpoint import LEARNER
from training.tensor_files import saved_tensors

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=96", "train.checkpoint_frequency=2")
ONE = (
    "env.curriculum.column=operand",
    "env.curriculum.bins=4",
    "env.curriculum.gate=0.2",
    "env.curriculum.window=6",
    "env.curriculum.priority=learnability",
    "env.curriculum.replay=0.3",
    "env.curriculum.solved=0.5",
)
MIXED = (
    "env.dataset=mixture",
    "env.options={}",
    "env.mixture={near:{dataset:arithmetic,options:{max_operand:9}},far:{dataset:arithmetic,weight:2}}",
    "env.curriculum.sources=failure",
    "env.curriculum.window=4",
)


def sums(folder: Path) -> list[dict[str, float]]:
    return [without_clocks(row) for row in rows(folder)]


@pytest.mark.parametrize("given", [ONE, MIXED, (*ONE, *MIXED)], ids=["one", "mixed", "both"])
def test_a_resumed_run_is_the_same_run(given: tuple[str, ...], tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_job(configured(*SMALL, *given), whole, grpo.train, Lockstep)
    for killed_after in (2, 4):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole, broken)
        for later in range(killed_after + 2, 7, 2):
            shutil.rmtree(checkpoint_path(broken, later))
        run_job(configured(*SMALL, *given, "train.resume=auto"), broken, grpo.train, Lockstep)
        assert sums(broken) == sums(whole)
        ends = [saved_tensors(checkpoint_path(folder, 6) / LEARNER) for folder in (whole, broken)]
        assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert any(name.startswith("curriculum/") for name in sums(whole)[-1])


def test_what_the_levels_were_made_of_stays(tmp_path: Path) -> None:
    run_job(configured(*SMALL, *ONE), tmp_path, grpo.train, Lockstep)
    more = ("train.resume=auto", "train.total_dialog_turns=112")
    with pytest.raises(ConfigError, match=r"env\.curriculum\.bins: 4 -> 3"):
        run_job(configured(*SMALL, *ONE, *more, "env.curriculum.bins=3"), tmp_path, grpo.train, Lockstep)
    run_job(configured(*SMALL, *ONE, *more, "env.curriculum.gate=0.9"), tmp_path, grpo.train, Lockstep)
    assert len(rows(tmp_path)) == 7


@pytest.mark.parametrize("script", [grpo, grpo_async])
def test_every_metric_of_a_curriculum_is_explained(script: object, tmp_path: Path) -> None:
    schedule = SCHEDULE_OF[script]  # type: ignore[index]
    for number, given in enumerate((ONE, (*ONE, *MIXED))):
        run_job(configured(*SMALL, *given), tmp_path / str(number), script.train, schedule)  # type: ignore[attr-defined]
        logged = {
            name for row in rows(tmp_path / str(number)) for name in row if name.startswith("curriculum/")
        }
        assert logged and {name for name in logged if pattern_of(name) is None} == set()
