"""Imports modules of a run once, in the fork server of killed runs."""

import importlib
from pathlib import Path

from tests.killed_runs import one_epoch

MODULES = (
    "envs.reward_workers.service",
    "envs.tasks",
    "torchgrpo.reports.report",
    "rich.table",
    "torchgrpo.rollout.group_stream",
    "torchgrpo.run.build_run",
    "torchgrpo.rollout.engines.build_engines",
    "torchgrpo.run.callbacks",
    "torchgrpo.training.checkpoint",
    "torchgrpo.training.grpo_loss",
    "torchgrpo.training.learner",
    "torchgrpo.training.model_writer",
    "transformers.models.llama.modeling_llama",
)
for _name in MODULES:
    importlib.import_module(_name)
one_epoch("wait", Path("nothing_there"))
