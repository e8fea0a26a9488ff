"""For how long a checkpoint stops a run: waiting for its files, or only for a copy of the state.

    python benchmarks/checkpoints.py [--model FOLDER] [--parameters 135]        (millions, where no model is given)

A model's weights and AdamW's states, as after a first step, go to the folder of --to, by default a temporary one. A
step is a matrix product: as many in a second beside the writing thread as alone, if it takes nothing from the run.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from config.optimizer import OptimizerConfig
from config.train import TrainConfig
from run.checkpoint_writer import CheckpointWriter
from training.learner_state import learner_tensors
from training.optimizer import make_optimizer
from training.tensor_files import copied, read_tensors, write_tensors


def state_of(folder: str | None, millions: int) -> dict[str, torch.Tensor]:
    if folder is None:
        layers = max(1, round((millions - 28) / 3.57))
        shape = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
            num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(shape)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return learner_tensors(model, make_optimizer(model, OptimizerConfig()))


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def steps_in(duration: float) -> float:
    """Matrix products a second, in one thread: the files have another core."""
    torch.set_num_threads(1)
    matrix, count, began = torch.randn(512, 512), 0, time.perf_counter()
    while time.perf_counter() - began < duration:
        matrix @ matrix
        count += 1
    return count / (time.perf_counter() - began)


def measure(tensors: dict[str, torch.Tensor], folder: Path, background: bool) -> None:
    def save(path: Path) -> Callable[[], None]:
        state = copied(tensors) if background else tensors
        return lambda: write_tensors(path, state)

    for repeat in (1, 2, 3):
        writer = CheckpointWriter(folder, TrainConfig(async_checkpoint=background, keep_checkpoints=1))
        stopped = seconds(partial(writer.write, repeat, {"iteration": repeat}, save))
        waited = seconds(writer.wait)
        print(f"  {stopped:8.3f} s stopped, {waited:8.3f} s more until it has its name")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--parameters", type=int, default=135)
    parser.add_argument("--to", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    tensors = state_of(arguments.model, arguments.parameters)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(f"{len(tensors)} tensors, {held / 2**30:.3f} GiB")
    folder = Path(tempfile.mkdtemp(dir=arguments.to))
    try:
        for background in (False, True):
            print(f"train.async_checkpoint={str(background).lower()}")
            measure(tensors, folder, background)
        free = steps_in(2.0)
        writer = CheckpointWriter(folder, TrainConfig())
        writer.write(9, {}, lambda path: lambda: write_tensors(path, tensors))
        beside = steps_in(1.0)
        writer.wait()
        print(f"steps in the first second of writing: {beside / free:.0%} of what they are alone")
        path = folder / "checkpoints" / "checkpoint_000009" / "learner"
        print(f"read in {seconds(lambda: read_tensors(path, tensors)):.3f} s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
