"""Helpers of the benchmarks for arguments, configs, timing, machine descriptions and random models."""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from transformers import LlamaConfig, LlamaForCausalLM

from config.cli.composition import CONFIG_DIR, register_schema, to_config
from config.schema.config import Config

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "torchgrpo" / "models" / "quickstart"
QUIET = ("logging.progress=false", "logging.sample_frequency=0", "train.checkpoint_frequency=0")
"""Overrides that disable progress output, samples and checkpoints."""


def make_parser(about: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Returns an argument parser with an integer option for each of `numbers`.

    about: the benchmark's docstring, which is the help text. numbers: option names and defaults.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser


def compose_config(name: str, *overrides: str) -> Config:
    """Returns a shipped config with overrides as a checked `Config`."""
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return to_config(compose(name, overrides=[*QUIET, *overrides]))


def time_call(action: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of a call, and its result."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def format_spread(values: Sequence[float], digits: int = 3) -> str:
    """Formats median, minimum and maximum of some values."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def describe_machine() -> str:
    """Describes processor, cores, GPU, torch version and date in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "a CPU")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {processor}{gpu}, torch {torch.__version__}, {date.today()}"


def save_llama(folder: Path, vocabulary: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> str:
    """Saves a random Llama with tied embeddings and returns its folder."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def answer_length(deviation: float, limit: int) -> int:
    """Returns a log-normal answer length in tokens with a median of a quarter of `limit`.

    deviation: a sample of the standard normal distribution.
    """
    return min(limit, max(4, int(math.exp(0.8 * deviation) * limit / 4)))
