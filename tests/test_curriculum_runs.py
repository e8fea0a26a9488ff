"""Runs with a curriculum; tests/test_exact_resume.py kills them."""

from pathlib import Path
from types import ModuleType

import pytest

import grpo
import grpo_async
from config.schema.errors import ConfigError
from tests.killed_runs import CURRICULUM
from tests.scripts import SCHEDULE_OF, configured, rows
from torchgrpo.monitoring.metric_table import pattern_of
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=96", "train.checkpoint_frequency=2")
ONE = (*CURRICULUM, "env.curriculum.solved=0.5")
MIXED = (
    "env.dataset=mixture",
    "env.options={}",
    "env.mixture={near:{dataset:arithmetic,options:{max_operand:9}},far:{dataset:arithmetic,weight:2}}",
    "env.curriculum.sources=failure",
    "env.curriculum.window=4",
)


@pytest.mark.long
def test_what_the_levels_were_made_of_stays(tmp_path: Path) -> None:
    run_job(configured(*SMALL, *ONE), tmp_path, grpo.train, Lockstep)
    more = ("train.resume=auto", "train.total_dialog_turns=112")
    with pytest.raises(ConfigError, match=r"env\.curriculum\.bins: 3 -> 4"):
        run_job(configured(*SMALL, *ONE, *more, "env.curriculum.bins=4"), tmp_path, grpo.train, Lockstep)
    run_job(configured(*SMALL, *ONE, *more, "env.curriculum.gate=0.9"), tmp_path, grpo.train, Lockstep)
    assert len(rows(tmp_path)) == 7


@pytest.mark.parametrize(("script", "given"), [(grpo, ONE), (grpo_async, (*ONE, *MIXED))])
def test_every_metric_of_a_curriculum_is_explained(
    script: ModuleType, given: tuple[str, ...], tmp_path: Path
) -> None:
    run_job(configured(*SMALL, *given), tmp_path, script.train, SCHEDULE_OF[script])
    logged = {name for row in rows(tmp_path) for name in row if name.startswith("curriculum/")}
    assert logged and {name for name in logged if pattern_of(name) is None} == set()
