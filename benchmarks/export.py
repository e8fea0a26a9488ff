"""What it takes to make the model of a checkpoint: seconds, and memory of the host beyond what was there before.

    python benchmarks/export.py [--parameters 500] [--lora]        (millions)

A model of that many parameters in bfloat16, random, is saved in Hugging Face format, and a checkpoint of it, or of an
adapter on it, is written. A process of its own then makes the model. What it maps from files counts as memory here.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from config.models import LoraConfig, ModelConfig
from training.adapters import add_lora
from training.model_writer import ModelWriter
from training.tensor_files import write_tensors
from training.trained_parameters import MODEL, trained_tensors

ROOT = Path(__file__).resolve().parents[1]


def prepare(folder: Path, millions: int, lora: LoraConfig) -> None:
    layers = max(1, round((millions - 131) / 12.6))
    shape = LlamaConfig(
        vocab_size=128_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "quickstart" / name, folder / "base")
    policy = add_lora(model, lora) if lora.enabled else model
    tensors = {f"{MODEL}{name}": tensor for name, tensor in trained_tensors(policy).items()}
    write_tensors(folder / "learner", tensors)
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters")


def measure(folder: Path, lora: LoraConfig) -> None:
    began = time.perf_counter()
    writer = ModelWriter(ModelConfig(name=str(folder / "base"), dtype="bfloat16"), lora)
    made = time.perf_counter()
    process, most, done = psutil.Process(), 0, threading.Event()
    before = process.memory_info()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            now = process.memory_info()
            most = max(most, now.rss - before.rss)

    threading.Thread(target=watch, daemon=True).start()
    (folder / "model").mkdir()
    writer.write(folder / "learner", folder / "model")
    done.set()
    size = sum(path.stat().st_size for path in (folder / "model").rglob("*") if path.is_file())
    print(
        f"layers without memory {made - began:.2f} s; written in {time.perf_counter() - made:.2f} s, "
        f"{size / 2**30:.2f} GiB on disk, {most / 2**30:.2f} GiB of memory at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    lora = LoraConfig(enabled=arguments.lora)
    if arguments.measure:
        measure(arguments.measure, lora)
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), arguments.parameters, lora)
        again = [*sys.argv, "--measure", name]
        subprocess.run([sys.executable, *again], check=True)


if __name__ == "__main__":
    main()
