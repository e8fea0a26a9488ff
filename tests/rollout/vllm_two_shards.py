"""A script: an engine of two tensor-parallel workers, each a process of its own, is pushed to twice.

    vllm_two_shards.py FOLDER OUT

FOLDER is a tied tiny model's. In OUT: how far its scores are from the model's after each push, the versions of what it
draws then, and how many files its workers share, and which are left when it has ended. vLLM would start interpreters
for the workers on a CPU; here they are forked, for this process has nothing but what they import.
"""

import json
import multiprocessing
import sys
from pathlib import Path
from unittest.mock import patch

from vllm.v1.executor import multiproc_executor

from envs.group import Sampling
from tests.rollout.conftest import tiny_llama, tiny_settings
from tests.rollout.scoring import far, tokens
from torchgrpo.rollout.engines.interface import Request, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine


def main(folder: Path, out: Path) -> None:
    with patch.object(multiproc_executor, "get_mp_context", lambda: multiprocessing.get_context("fork")):
        engine = VLLMEngine(tiny_settings(folder, tensor_parallel_size=2))
    sequences = [tokens(200, 1)]
    shared = list(engine._files)
    gaps = []
    for version in (1, 2):
        model = tiny_llama(True, seed=version)
        engine.load(model.state_dict().items(), version)
        gaps.append(far(model, engine, sequences))
    (response,) = generate(engine, [Request(1, (5, 6, 7), 2, Sampling(max_tokens=4), seed=0)])
    engine.close()
    found = {
        "gaps": gaps,
        "versions": response.completions[0].policy_versions,
        "shared": len(shared),
        "left": [str(file) for file in shared if file.exists()],
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
