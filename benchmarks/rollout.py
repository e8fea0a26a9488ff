"""Tokens per second: vLLM alone, behind our engine, and in a pool of Ray actors, on the same prompts.

    python benchmarks/rollout.py                     the tiny model of this repository
    python benchmarks/rollout.py --model FOLDER --prompts 16 --max-tokens 64
    python benchmarks/rollout.py --engines 2         two actors

`bare` drives vLLM's LLMEngine with add_request and step and looks at nothing but the number of tokens; `engine`
is `rollout/vllm_engine.py` around the same LLMEngine; `pool` is the same engine in each actor. The three take
turns, every completion runs to its limit; medians of `--rounds` after a warm-up. A ratio is the median over the
rounds of this variant's rate to that of `bare` in the same round; `engine` and a pool of one should reach 0.95.
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
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from config.model_shape import find_config, kv_cache_bytes, read_shape  # noqa: E402
from rollout.engine import Engine, Request, Sampling, generate  # noqa: E402
from rollout.pool import PoolSettings, RayPool  # noqa: E402
from rollout.ray_runtime import EnginePlace  # noqa: E402
from rollout.vllm_engine import VLLMEngine  # noqa: E402
from rollout.vllm_settings import VLLMSettings  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "quickstart"), help="a Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--n", type=int, default=8, help="completions per prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def make_requests(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    shape = (options.prompts, options.prompt_tokens)
    prompts = torch.randint(vocabulary, shape, generator=generator).tolist()
    sampling = Sampling(max_tokens=options.max_tokens)
    return [Request(i, tuple(prompt), options.n, sampling, seed=i) for i, prompt in enumerate(prompts)]


def run_bare(engine: VLLMEngine, requests: list[Request]) -> int:
    """The same requests through vLLM itself; returns the number of tokens."""
    llm = engine._llm
    for request in requests:
        params = engine._sampling(request.sampling, request.n, request.seed)
        llm.add_request(str(request.request_id), {"prompt_token_ids": list(request.prompt)}, params)
    tokens = 0
    with torch.compiler.set_stance("force_eager"):
        while llm.has_unfinished_requests():
            tokens += sum(len(part.token_ids) for output in llm.step() for part in output.outputs)
    return tokens


def run_engine(engine: Engine, requests: list[Request]) -> int:
    responses = generate(engine, requests)
    return sum(len(completion.token_ids) for r in responses for completion in r.completions)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    path = find_config(options.model)
    assert path is not None
    shape = read_shape(path)
    longest = options.prompt_tokens + options.max_tokens
    settings = VLLMSettings(
        model=options.model,
        eos_token_ids=(),  # every completion runs to its limit
        max_model_len=longest,
        kv_cache_bytes=kv_cache_bytes(shape, longest, 256, dtype_bytes=4),
    )
    requests = make_requests(options, shape.vocab_size)
    engine = VLLMEngine(settings)
    places = [EnginePlace(f"engine {index}") for index in range(options.engines)]
    pool = RayPool(partial(VLLMEngine, settings), places, PoolSettings())
    variants: dict[str, Callable[[], int]] = {
        "bare": partial(run_bare, engine, requests),
        "engine": partial(run_engine, engine, requests),
        f"pool of {options.engines}": partial(run_engine, pool, requests),
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    try:
        for turn in range(options.rounds + 1):
            for name, run in variants.items():
                begin = time.perf_counter()
                tokens = run()
                if turn:
                    rates[name].append(tokens / (time.perf_counter() - begin))
    finally:
        pool.close()
        engine.close()
    print(f"{options.model}: {options.prompts} x {options.n} completions of {options.max_tokens} tokens")
    for name, values in rates.items():
        ratio = statistics.median(mine / bare for mine, bare in zip(values, rates["bare"], strict=True))
        median, spread = statistics.median(values), f"{min(values):.0f} to {max(values):.0f}"
        print(f"  {name:10} {median:9.0f} tokens/s ({spread})   {ratio:4.2f} x bare")


if __name__ == "__main__":
    main()
