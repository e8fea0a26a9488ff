"""Imports of a run and a composed config, loaded once by the fork server of runs that are killed."""

import importlib
from pathlib import Path

from tests.killed_runs import one_epoch

IMPORTED = (
    "envs.judging.service",
    "envs.tasks",
    "torchgrpo.reports.report",
    "rich.table",
    "torchgrpo.rollout.stream",
    "torchgrpo.run.build",
    "torchgrpo.rollout.engines.build",
    "torchgrpo.run.callbacks",
    "torchgrpo.training.checkpoint",
    "torchgrpo.training.grpo_loss",
    "torchgrpo.training.learner",
    "torchgrpo.training.model_writer",
    "transformers.models.llama.modeling_llama",
)
for _name in IMPORTED:
    importlib.import_module(_name)
one_epoch("wait", Path("nothing_there"))
