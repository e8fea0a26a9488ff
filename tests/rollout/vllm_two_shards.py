"""Script that pushes weights twice to an engine of two tensor-parallel worker processes.

    vllm_two_shards.py FOLDER OUT

FOLDER has a tied tiny model. The script writes to OUT: the largest gap of the scores after each push, the policy
versions of tokens sampled then, the number of files that the workers share, and the files left after the end. vLLM
would start new interpreters for the workers on a CPU; the script forks them, which is faster.
"""

import json
import multiprocessing
import sys
from pathlib import Path
from unittest.mock import patch

from vllm.v1.executor import multiproc_executor

from envs.group import Sampling
from tests.rollout.conftest import tiny_llama, tiny_settings
from tests.rollout.log_prob_comparison import max_log_prob_gap, random_tokens
from torchgrpo.rollout.engines.interface import Request, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine


def main(folder: Path, out: Path) -> None:
    with patch.object(multiproc_executor, "get_mp_context", lambda: multiprocessing.get_context("fork")):
        engine = VLLMEngine(tiny_settings(folder, tensor_parallel_size=2))
    sequences = [random_tokens(200, 1)]
    shared = list(engine._worker_files)
    gaps = []
    for version in (1, 2):
        model = tiny_llama(True, seed=version)
        engine.load(model.state_dict().items(), version)
        gaps.append(max_log_prob_gap(model, engine, sequences))
    (response,) = generate(engine, [Request(1, (5, 6, 7), 2, Sampling(max_tokens=4), seed=0)])
    engine.close()
    results = {
        "gaps": gaps,
        "versions": response.completions[0].policy_versions,
        "shared": len(shared),
        "left": [str(file) for file in shared if file.exists()],
    }
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
