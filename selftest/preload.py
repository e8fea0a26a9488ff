"""What the processes of the checks have in common, imported once by the server that forks them.

Importing it takes ten seconds and more; twenty processes would spend most of the self-test on it. A process may be
forked only while no thread runs and no CUDA driver is in use, which is made sure of here: an exception ends the
server, and the checks then start as fresh processes.
"""

import contextlib
import os
import threading
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ["HF_HUB_OFFLINE"] = "1"

with contextlib.suppress(Exception):  # what cannot be imported is for the checks to tell
    from rollout.vllm_settings import set_environment

    set_environment()

_files = Path("/proc/self/fd")
_open = [os.readlink(file) for file in _files.iterdir() if file.is_symlink()] if _files.is_dir() else []
if threading.active_count() > 1 or any("nvidia-uvm" in name for name in _open):
    raise RuntimeError(
        "the imports have started threads or the CUDA driver: no process can be forked from here"
    )
