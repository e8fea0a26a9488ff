"""Seconds per weight push and transport, beside a plain copy of the same bytes.

    python benchmarks/push.py                        a tiny model and one of 135 million parameters, random weights
    python benchmarks/push.py --model FOLDER         a model of your own
    python benchmarks/push.py --engines 1 2 4        so many engines behind each transport

Every push goes into real vLLM engines (CPU build, fp32). `in process` gives one live tensors; the others go to
engines in Ray actors, through shared memory or Ray's object store, and each engine writes and packs the whole model
on this machine's cores. `clone` allocates, `warm copy` writes into memory that is already there; both alternate with
the pushes, and the ratios are of medians of `--repeats` after one warm-up. `adapters` are pushes of merged LoRA
after the first; MiB is what was made or copied for one push, to all engines together.
"""

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import arguments, machine, save_llama, timed
from config.schema.models import LoraConfig
from torchgrpo.cluster.runtime import Place
from torchgrpo.rollout.engines.interface import WeightTarget
from torchgrpo.rollout.engines.pool import RayPool
from torchgrpo.rollout.engines.supervisor import PoolSettings
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.weights.host_copy import HostCopy, Transport
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.published_weights import PolicyWeights, made, named_weights

SIZES = {"tiny": (320, 64, 128, 2, 4, 2), "135M": (49152, 576, 1536, 30, 9, 3)}


class Pushes:
    """Pushes of one model, and copies of what a push carries."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.learner = PolicyWeights(model, named_weights)
        adapters = LoraConfig(enabled=True)
        self.adapted = PolicyWeights(add_lora(copy.deepcopy(model), adapters), named_weights)
        self.weights = made(self.learner.publish())
        self.there = {name: tensor.clone() for name, tensor in self.weights.items()}

    def report(self, name: str, target: WeightTarget) -> None:
        for kind, learner in (("", self.learner), (", adapters", self.adapted)):
            took: list[tuple[float, ...]] = []
            for version in range(self.options.repeats + 1):
                outgoing = Outgoing(learner.publish())
                push = timed(partial(target.load, outgoing, version))[0]
                took.append((push, timed(self._clone)[0], timed(self._copy)[0]))
            push, clone, warm = (statistics.median(one) for one in zip(*took[1:], strict=True))
            print(
                f"  {name + kind:26} {1e3 * push:8.1f} ms {outgoing.moved.bytes / 2**20:8.1f} MiB"
                f"  {push / clone:5.2f} x clone ({1e3 * clone:.1f} ms) {push / warm:5.2f} x warm copy"
                f" ({1e3 * warm:.1f} ms)",
                flush=True,
            )

    def _clone(self) -> None:
        copies = [tensor.clone() for tensor in self.weights.values()]
        del copies

    def _copy(self) -> None:
        for name, tensor in self.weights.items():
            self.there[name].copy_(tensor)

    def settings(self) -> VLLMSettings:
        return VLLMSettings(
            model=str(self.folder),
            eos_token_ids=(2,),
            max_model_len=256,
            kv_cache_bytes=64 << 20,
            max_num_seqs=16,
        )

    def measure(self) -> None:
        engine = VLLMEngine(self.settings())
        self.report("in_process", engine)
        engine.close()
        ways: dict[str, Callable[[], HostCopy]] = {"shared_memory": SharedMemory, "object_store": ObjectStore}
        for count in self.options.engines:
            for way, memory in ways.items():
                places = [Place(f"engine {index}") for index in range(count)]
                make = partial(VLLMEngine, self.settings())
                pool = RayPool(make, places, PoolSettings(), Transport(memory()))
                try:
                    self.report(f"{way} x {count}", pool)
                finally:
                    pool.close()


def measure(name: str, folder: Path, options: argparse.Namespace) -> None:
    pushes = Pushes(folder, options)
    mib = sum(tensor.nbytes for tensor in pushes.weights.values()) / 2**20
    print(
        f"{name}: {len(pushes.weights)} tensors, {mib:.1f} MiB, {torch.get_num_threads()} threads", flush=True
    )
    pushes.measure()


def main() -> None:
    parser = arguments(__doc__, repeats=7, threads=torch.get_num_threads())
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--engines", type=int, nargs="*", default=[1], help="none: in process alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    if options.model is not None:
        measure(options.model.name, options.model, options)
        return
    for name in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            save_llama(Path(folder), *SIZES[name])
            measure(name, Path(folder), options)


if __name__ == "__main__":
    main()
