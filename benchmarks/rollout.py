"""Compares generation rates of bare vLLM, our vLLM engine and our pool of Ray actors.

    python benchmarks/rollout.py                     the tiny model of this repository
    python benchmarks/rollout.py --model FOLDER --prompts 16 --max-tokens 64
    python benchmarks/rollout.py --engines 2         two actors

`bare` drives vLLM's LLMEngine with add_request and step and only counts tokens; `engine` is
`torchgrpo/rollout/engines/vllm_engine.py` around the same LLMEngine; `pool` runs that engine in each actor. The
three variants take turns on the same prompts, and every completion runs to its limit. Rates are medians of
`--rounds` after a warm-up. A ratio is the median over the rounds of a variant's rate divided by the rate of
`bare` in the same round; `engine` and a pool of one should reach 0.95. The second ratio uses CPU seconds of all
processes, which other work on the machine disturbs less.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from benchmarks.common import QUICKSTART, describe_machine, format_spread, make_parser
from envs.group import Sampling
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.plan.model_shape import find_shape, kv_cache_bytes
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings
from torchgrpo.rollout.engines.interface import Engine, Request, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory


def make_requests(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    shape = (options.prompts, options.prompt_tokens)
    prompts = torch.randint(vocabulary, shape, generator=generator).tolist()
    sampling = Sampling(max_tokens=options.max_tokens)
    return [Request(i, tuple(prompt), options.n, sampling, seed=i) for i, prompt in enumerate(prompts)]


def run_bare(engine: VLLMEngine, requests: list[Request]) -> int:
    """Runs the requests through vLLM without our engine; returns the number of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine._llm
    for request in requests:
        params = SamplingParams(
            n=request.n,
            seed=request.seed,
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_tokens,
            ignore_eos=True,
            stop_token_ids=list(engine.settings.eos_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.add_request(str(request.request_id), {"prompt_token_ids": list(request.prompt)}, params)
    tokens = 0
    with torch.compiler.set_stance("force_eager"):
        while llm.has_unfinished_requests():
            tokens += sum(len(part.token_ids) for output in llm.step() for part in output.outputs)
    return tokens


def run_engine(engine: Engine, requests: list[Request]) -> int:
    responses = generate(engine, requests)
    return sum(len(completion.token_ids) for r in responses for completion in r.completions)


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and all engine actors."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        if "EngineActor" in process.name():
            times = process.cpu_times()
            total += times.user + times.system
    return total


def main() -> None:
    parser = make_parser(__doc__, prompts=64, prompt_tokens=32, n=8, max_tokens=96, engines=1, rounds=7)
    parser.add_argument("--model", default=str(QUICKSTART), help="a Hugging Face folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = find_shape(options.model)
    assert shape is not None
    longest = options.prompt_tokens + options.max_tokens
    settings = VLLMSettings(
        model=options.model,
        eos_token_ids=(),  # every completion runs to its limit
        max_model_len=longest,
        kv_cache_bytes=kv_cache_bytes(shape, longest, 256, dtype_bytes=4),
    )
    requests = make_requests(options, shape.vocab_size)
    engine = VLLMEngine(settings)
    slots = [DeviceSlot(f"engine {index}") for index in range(options.engines)]
    pool = RayEnginePool(partial(VLLMEngine, settings), slots, EnginePoolSettings(), WeightTransport(SharedMemory()))
    variants: dict[str, Callable[[], int]] = {
        "bare": partial(run_bare, engine, requests),
        "engine": partial(run_engine, engine, requests),
        f"pool of {options.engines}": partial(run_engine, pool, requests),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    try:
        for turn in range(options.rounds + 1):
            for name, run in variants.items():
                start, cpu = time.perf_counter(), cpu_seconds()
                tokens = run()
                if turn:
                    rates[name].append((tokens / (time.perf_counter() - start), tokens / (cpu_seconds() - cpu)))
    finally:
        pool.close()
        engine.close()
    print(
        f"{describe_machine()}\n{options.model}: {options.prompts} x {options.n} completions "
        f"of {options.max_tokens} tokens"
    )
    for name, values in rates.items():
        pairs = list(zip(values, rates["bare"], strict=True))
        by_clock, by_cpu = (statistics.median(mine[i] / bare[i] for mine, bare in pairs) for i in (0, 1))
        rate = format_spread([rate for rate, _ in values], digits=0)
        print(f"  {name:10} {rate} tokens/s   {by_clock:.2f} x bare, by CPU time {by_cpu:.2f} x")


if __name__ == "__main__":
    main()
