"""Seconds per weight push and transport, beside a plain copy of the same bytes.

    python benchmarks/push.py                        a tiny model and one of 135 million parameters, random weights
    python benchmarks/push.py --model FOLDER         a model of your own

Every push goes into a real vLLM engine (CPU build, fp32). `in process` gives it live tensors; the others go to
one engine in a Ray actor, through shared memory or Ray's object store. `copy` clones the tensors, as a push must
allocate too; `warm copy` writes into memory that is already there. Medians of `--repeats` after one warm-up.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.runtime import Place
from rollout.engines.fleet import PoolSettings
from rollout.engines.pool import RayPool
from rollout.engines.sampler import WeightTarget
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.vllm_settings import VLLMSettings
from rollout.weights.outgoing import Outgoing
from rollout.weights.transports import HostCopy, ObjectStore, SharedMemory, Transport
from training.weights import made, named_weights

SIZES = {
    "tiny": LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "135M": LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=None, help="a Hugging Face folder")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    action()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measure(name: str, folder: Path, repeats: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = made(named_weights(model))
    megabytes = sum(tensor.nbytes for tensor in weights.values()) / 2**20
    there = {key: tensor.clone() for key, tensor in weights.items()}

    def copy_into_place() -> None:
        for key, tensor in weights.items():
            there[key].copy_(tensor)

    copy = median_seconds(lambda: [tensor.clone() for tensor in weights.values()], repeats)
    warm = median_seconds(copy_into_place, repeats)
    print(f"{name}: {len(weights)} tensors, {megabytes:.1f} MiB")
    print(f"  {'copy':14} {1e3 * copy:9.1f} ms   1.00 x copy")
    print(f"  {'warm copy':14} {1e3 * warm:9.1f} ms   {warm / copy:4.2f} x copy")
    settings = VLLMSettings(
        model=str(folder), eos_token_ids=(2,), max_model_len=256, kv_cache_bytes=128 << 20, max_num_seqs=16
    )
    ways: dict[str, HostCopy] = {"shared_memory": SharedMemory(), "object_store": ObjectStore()}
    for way, memory in ways.items():
        place, transport = Place("engine 0"), Transport(memory)
        pool = RayPool(partial(VLLMEngine, settings), [place], PoolSettings(), transport)
        try:
            report(way, pool, weights, repeats, copy)
        finally:
            pool.close()
    engine = VLLMEngine(settings)
    report("in_process", engine, weights, repeats, copy)
    engine.close()


def report(
    name: str, target: WeightTarget, weights: dict[str, torch.Tensor], repeats: int, copy: float
) -> None:
    seconds = median_seconds(lambda: target.load(Outgoing.of(weights.items()), version=1), repeats)
    print(f"  {name:14} {1e3 * seconds:9.1f} ms   {seconds / copy:4.2f} x copy", flush=True)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.model is not None:
        measure(options.model.name, options.model, options.repeats)
        return
    for name, config in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(config).save_pretrained(folder)
            measure(name, Path(folder), options.repeats)


if __name__ == "__main__":
    main()
