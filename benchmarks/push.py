"""Measures the time of weight pushes to vLLM engines by transport, beside plain copies.

    python benchmarks/push.py                        a tiny model and one of 135 million parameters, random weights
    python benchmarks/push.py --model FOLDER         a model of your own
    python benchmarks/push.py --engines 1 2 4        several engine counts for each transport

Pushes go to real vLLM engines (CPU build, fp32). `in_process` passes live tensors to one engine. The other
transports serve engines in Ray actors through shared memory or Ray's object store, and each engine writes and
packs the whole model on this machine's cores. `clone` allocates memory, `warm copy` writes into allocated
memory; both alternate with the pushes, and the ratios are those of medians of `--repeats` after one warm-up.
`adapters` are pushes of merged LoRA weights after the first push. MiB is the memory that a push allocates or
copies for all engines.
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

from benchmarks.common import describe_machine, make_parser, save_llama, time_call
from config.schema.models import LoraConfig
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings
from torchgrpo.rollout.engines.interface import WeightTarget
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.weights.host_weight_copy import HostWeightCopy, WeightTransport
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.published_weights import PolicyWeights, make_tensors, named_weights

SIZES = {"tiny": (320, 64, 128, 2, 4, 2), "135M": (49152, 576, 1536, 30, 9, 3)}


class PushBenchmark:
    """Times weight pushes of one model, and copies of the same weights."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.learner = PolicyWeights(model, named_weights)
        adapters = LoraConfig(enabled=True)
        self.adapter_learner = PolicyWeights(add_lora(copy.deepcopy(model), adapters), named_weights)
        self.weights = make_tensors(self.learner.publish())
        self.destination = {name: tensor.clone() for name, tensor in self.weights.items()}

    def report(self, name: str, target: WeightTarget) -> None:
        """Times pushes to `target` and prints their medians."""
        for kind, learner in (("", self.learner), (", adapters", self.adapter_learner)):
            durations: list[tuple[float, ...]] = []
            for version in range(self.options.repeats + 1):
                weight_update = WeightUpdate(learner.publish())
                push = time_call(partial(target.load, weight_update, version))[0]
                durations.append((push, time_call(self._clone)[0], time_call(self._copy)[0]))
            push, clone, warm = (statistics.median(one) for one in zip(*durations[1:], strict=True))
            print(
                f"  {name + kind:26} {1e3 * push:8.1f} ms {weight_update.transfer_size.bytes / 2**20:8.1f} MiB"
                f"  {push / clone:5.2f} x clone ({1e3 * clone:.1f} ms) {push / warm:5.2f} x warm copy"
                f" ({1e3 * warm:.1f} ms)",
                flush=True,
            )

    def _clone(self) -> None:
        copies = [tensor.clone() for tensor in self.weights.values()]
        del copies

    def _copy(self) -> None:
        for name, tensor in self.weights.items():
            self.destination[name].copy_(tensor)

    def settings(self) -> VLLMSettings:
        return VLLMSettings(
            model=str(self.folder), eos_token_ids=(2,), max_model_len=256, kv_cache_bytes=64 << 20, max_num_seqs=16
        )

    def measure(self) -> None:
        """Measures all transports: in process, then to each number of engine actors."""
        engine = VLLMEngine(self.settings())
        self.report("in_process", engine)
        engine.close()
        transports: dict[str, Callable[[], HostWeightCopy]] = {
            "shared_memory": SharedMemory,
            "object_store": ObjectStore,
        }
        for count in self.options.engines:
            for transport, memory in transports.items():
                slots = [DeviceSlot(f"engine {index}") for index in range(count)]
                make_engine = partial(VLLMEngine, self.settings())
                pool = RayEnginePool(make_engine, slots, EnginePoolSettings(), WeightTransport(memory()))
                try:
                    self.report(f"{transport} x {count}", pool)
                finally:
                    pool.close()


def measure(name: str, folder: Path, options: argparse.Namespace) -> None:
    pushes = PushBenchmark(folder, options)
    mib = sum(tensor.nbytes for tensor in pushes.weights.values()) / 2**20
    print(f"{name}: {len(pushes.weights)} tensors, {mib:.1f} MiB, {torch.get_num_threads()} threads", flush=True)
    pushes.measure()


def main() -> None:
    parser = make_parser(__doc__, repeats=7, threads=torch.get_num_threads())
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--engines", type=int, nargs="*", default=[1], help="none: in process alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(describe_machine())
    if options.model is not None:
        measure(options.model.name, options.model, options)
        return
    for name in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            save_llama(Path(folder), *SIZES[name])
            measure(name, Path(folder), options)


if __name__ == "__main__":
    main()
