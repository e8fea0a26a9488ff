"""What the fork server of `tests/killed_runs.py` loads: all that a run imports, a composed config, and no garbage."""

import gc
import importlib
from pathlib import Path

from tests.killed_runs import one_epoch

IMPORTED = (
    "envs.judging.service",
    "envs.tasks",
    "reports.report",
    "rich.table",
    "run.build",
    "run.engines",
    "run.evaluation",
    "training.checkpoint",
    "training.model_writer",
)
for _name in IMPORTED:
    importlib.import_module(_name)
one_epoch("wait", Path("nothing_there"))
gc.collect()
gc.freeze()
