"""What the processes of the checks have in common, imported once by the server that forks them.

Importing it takes ten seconds and more; twenty processes would spend most of the self-test on it. A process may be
forked only while no thread runs and no CUDA driver is in use, which is made sure of here: otherwise the server
ends, and the checks start as fresh processes.
"""

import contextlib
import importlib
import os
import signal
import sys
from pathlib import Path

import psutil

from selftest.process import quiet_environment

MODULES = (
    *("selftest.machine", "selftest.learner", "selftest.engines", "selftest.runs", "grpo", "grpo_async"),
    *("training.checkpoint", "training.local_learner", "envs.judging.service"),
    *("rollout.collect", "rollout.stream", "monitoring.monitor", "peft", "ray"),
    *("vllm", "vllm.v1.engine.llm_engine"),
)
LONGEST_S = 90  # an import that hangs ends the server too

signal.alarm(LONGEST_S)
quiet_environment()  # before anything imports torch
importlib.import_module("rollout.engines.vllm_settings").set_environment()
for _name in MODULES:
    with contextlib.suppress(Exception):  # what cannot be imported is for the checks to tell
        importlib.import_module(_name)
signal.alarm(0)

_files = Path("/proc/self/fd")
_open = [os.readlink(file) for file in _files.iterdir() if file.is_symlink()] if _files.is_dir() else []
if psutil.Process().num_threads() > 1 or any("nvidia-uvm" in name for name in _open):
    sys.exit("imports have started threads or the CUDA driver: every check starts from nothing, and slower")
