"""What the processes of the checks have in common, imported once by the server that forks them.

Importing it takes ten seconds and more; twenty processes would spend most of the self-test on it. A process may be
forked only while no thread runs and no CUDA driver is in use, which is made sure of here: an exception ends the
server, and the checks then start as fresh processes.
"""

import contextlib
import importlib
import os
from pathlib import Path

import psutil

from rollout.vllm_settings import set_environment
from selftest.process import quiet_environment

MODULES = (
    *("selftest.machine", "selftest.learner", "selftest.engines", "selftest.runs", "grpo", "grpo_async"),
    *(
        "training.checkpoint",
        "training.learner",
        "envs.token_env",
        "envs.reward_service",
        "monitoring.monitor",
    ),
    *("rollout.collector", "rollout.streaming", "peft", "ray", "vllm", "vllm.v1.engine.llm_engine"),
)

quiet_environment()
set_environment()
for _name in MODULES:
    with contextlib.suppress(Exception):  # what cannot be imported is for the checks to tell
        importlib.import_module(_name)

_files = Path("/proc/self/fd")
_open = [os.readlink(file) for file in _files.iterdir() if file.is_symlink()] if _files.is_dir() else []
if psutil.Process().num_threads() > 1 or any("nvidia-uvm" in name for name in _open):
    raise RuntimeError(
        "the imports have started threads or the CUDA driver: no process can be forked from here"
    )
