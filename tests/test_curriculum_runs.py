"""Runs with a curriculum: resumes with changed settings, and documented metrics."""

from pathlib import Path
from types import ModuleType

import pytest

import grpo
import grpo_async
from config.schema.errors import ConfigError
from tests.killed_runs import CURRICULUM
from tests.script_runner import SCHEDULE_CLASSES, compose_run_config, read_metrics
from torchgrpo.monitoring.metric_table import pattern_of
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=96", "train.checkpoint_frequency=2")
LEVELS = (*CURRICULUM, "env.curriculum.solved=0.5")
SOURCES = (
    "env.dataset=mixture",
    "env.options={}",
    "env.mixture={near:{dataset:arithmetic,options:{max_operand:9}},far:{dataset:arithmetic,weight:2}}",
    "env.curriculum.sources=failure",
    "env.curriculum.window=4",
)


@pytest.mark.long
def test_a_resume_refuses_other_levels_and_accepts_another_gate(tmp_path: Path) -> None:
    run_job(compose_run_config(*SMALL, *LEVELS), tmp_path, grpo.train, LockstepRun)
    more = ("train.resume=auto", "train.total_dialog_turns=112")
    with pytest.raises(ConfigError, match=r"env\.curriculum\.bins: 3 -> 4"):
        run_job(compose_run_config(*SMALL, *LEVELS, *more, "env.curriculum.bins=4"), tmp_path, grpo.train, LockstepRun)
    run_job(compose_run_config(*SMALL, *LEVELS, *more, "env.curriculum.gate=0.9"), tmp_path, grpo.train, LockstepRun)
    assert len(read_metrics(tmp_path)) == 7


@pytest.mark.parametrize(("script", "settings"), [(grpo, LEVELS), (grpo_async, (*LEVELS, *SOURCES))])
def test_every_metric_of_a_curriculum_is_explained(
    script: ModuleType, settings: tuple[str, ...], tmp_path: Path
) -> None:
    run_job(compose_run_config(*SMALL, *settings), tmp_path, script.train, SCHEDULE_CLASSES[script])
    logged = {name for row in read_metrics(tmp_path) for name in row if name.startswith("curriculum/")}
    assert logged and {name for name in logged if pattern_of(name) is None} == set()
