"""Imports of a run and a composed config, loaded once by the fork server of runs that are killed."""

import importlib
from pathlib import Path

from tests.killed_runs import one_epoch

IMPORTED = (
    "envs.judging.service",
    "envs.tasks",
    "reports.report",
    "rich.table",
    "rollout.stream",
    "run.build",
    "run.engines",
    "run.evaluation",
    "training.checkpoint",
    "training.grpo_loss",
    "training.local_learner",
    "training.model_writer",
    "transformers.models.llama.modeling_llama",
)
for _name in IMPORTED:
    importlib.import_module(_name)
one_epoch("wait", Path("nothing_there"))
