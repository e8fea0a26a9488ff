"""A tiny random model with the quickstart's tokenizer, a config that trains it, and one run of a script."""

import functools
import json
from pathlib import Path
from typing import Any, cast

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from config.composition import CONFIG_DIR, register_schema, to_config
from config.schema import Config
from run.jobs import run_job
from run.lockstep import Lockstep
from run.overlapped import Overlapped
from selftest.check import Bench

TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "quickstart"
SMALL = (
    "logging.progress=false",
    "logging.sample_frequency=0",
    "train.checkpoint_frequency=0",
    "env.num_envs=4",
    "env.repeats=4",
    "env.max_prompt_tokens=24",
    "inference_model.max_tokens=8",
    "inference_model.max_num_seqs=16",
    "inference_model.start_timeout_s=120",
    "inference_model.request_timeout_s=60",
    "train.wait_timeout_s=60",
)
ON_A_GPU = ("inference_model.gpu_memory_utilization=0.4", "inference_model.enforce_eager=true")
SPREAD = 0.08
"""Of the random weights: four times the usual, so that log-probs react to every fault."""


def model_folder(bench: Bench, tied: bool = False, width: int = 128, layers: int = 2) -> Path:
    """A Hugging Face folder with random weights: Llama with a head of its own, or Qwen2 (biases, tied head)."""
    folder = bench.folder / f"model_{'tied' if tied else 'untied'}_{width}_{layers}"
    if folder.exists():
        return folder
    tokenizer, wide = AutoTokenizer.from_pretrained(TOKENIZER), width >= 256
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // (64 if wide else 32),
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.02 if wide else SPREAD,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model: PreTrainedModel
    model = Qwen2ForCausalLM(Qwen2Config(**shape)) if tied else LlamaForCausalLM(LlamaConfig(**shape))
    model.to(torch.float32).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer.save_pretrained(folder)
    return folder


def subfolder(bench: Bench, name: str) -> Path:
    folder = bench.folder / name
    folder.mkdir(exist_ok=True)
    return folder


def configured(bench: Bench, *overrides: str, tied: bool = False) -> Config:
    """The quickstart with the tiny model, on the bench's device; later overrides win."""
    usual = [f"model.name={model_folder(bench, tied)}", f"device={bench.device}", *SMALL]
    usual += ON_A_GPU if bench.device == "cuda" else ()
    return to_config(
        cast(DictConfig, OmegaConf.merge(_quickstart(), OmegaConf.from_dotlist([*usual, *overrides])))
    )


@functools.cache
def _quickstart() -> DictConfig:
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose("grpo_quickstart")


def train(
    bench: Bench,
    *overrides: str,
    overlapped: bool = False,
    iterations: int = 2,
    name: str = "run",
) -> list[dict[str, Any]]:
    """The rows of a run of grpo.py or grpo_async.py in this process.

    Raises:
        AssertionError: it did not make a step of every iteration.
    """
    import grpo
    import grpo_async

    config = configured(bench, *overrides)
    config.train.total_dialog_turns = iterations * config.completions_per_iteration
    run_dir = subfolder(bench, name)
    if overlapped:
        run_job(config, run_dir, grpo_async.train, Overlapped)
    else:
        run_job(config, run_dir, grpo.train, Lockstep)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == config.total_optimizer_steps, (
        f"{len(rows)} optimizer steps of {config.total_optimizer_steps}"
    )
    return rows


def moved(model: torch.nn.Module, seed: int) -> None:
    """Moves every weight that is trained a little, as an update would: adapters from zero, others by a tenth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            if "lora_" in name:
                parameter.copy_(0.2 * noise)
            else:
                parameter.mul_(1 + 0.1 * noise)
