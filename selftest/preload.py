"""What the processes of the checks have in common, imported once by the server that forks them.

Importing it takes ten seconds and more; twenty processes would spend most of the self-test on it. Where the server
cannot be made fit to be forked it ends, and the checks start as fresh processes.
"""

import gc
import importlib
import os
import signal

from selftest.forkable import LEFT_OUT, load
from selftest.process import quiet_environment

MODULES = (
    *("selftest.machine", "selftest.learner", "selftest.engines", "selftest.runs", "grpo", "grpo_async"),
    *("training.checkpoint", "training.local_learner", "envs.judging.service"),
    *("rollout.collect", "rollout.stream", "monitoring.monitor", "peft", "ray"),
    *("vllm", "vllm.v1.engine.llm_engine"),
)
LONGEST_S = 90  # an import that hangs ends the server too

if LEFT_OUT not in os.environ:  # a server that begins again has what is left of the first one's time
    signal.alarm(LONGEST_S)
gc.disable()  # what is imported is no garbage
quiet_environment()  # before anything imports torch
importlib.import_module("rollout.engines.vllm_settings").set_environment()
load(MODULES)
gc.freeze()
gc.enable()
signal.alarm(0)
