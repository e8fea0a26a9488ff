"""Writes tiny random models with the quickstart's tokenizer, and builds configs and runs of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from config.cli.composition import CONFIG_DIR, register_schema, to_config
from config.schema.config import Config
from torchgrpo.run.build_run import build_run
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.selftest.check import CheckWorkspace

TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "quickstart"
SMALL_RUN = (
    "logging.progress=false",
    "logging.sample_frequency=0",
    "train.checkpoint_frequency=0",
    "env.num_envs=4",
    "env.repeats=4",
    "env.max_prompt_tokens=24",
    "inference_model.max_tokens=8",
    "inference_model.max_num_seqs=16",
    "inference_model.start_timeout_s=3600",
    "inference_model.request_timeout_s=3600",
    "train.wait_timeout_s=3600",
)
"""Overrides of a small run; timeouts exceed each check's deadline, so that a busy machine fails no check."""
GPU_OVERRIDES = ("inference_model.gpu_memory_utilization=0.4", "inference_model.enforce_eager=true")
WEIGHT_STD = 0.08
"""Standard deviation of the random weights, four times the usual, so that log-probs react to every fault."""


def make_model_folder(workspace: CheckWorkspace, tied: bool = False, width: int = 128, layers: int = 2) -> Path:
    """Returns a folder with a random model: Llama, or Qwen2 with a tied head."""
    folder = workspace.folder / f"model_{tied}_{width}_{layers}"
    if folder.exists():
        return folder
    tokenizer, wide = AutoTokenizer.from_pretrained(TOKENIZER), width >= 256
    shape = AutoConfig.for_model(
        "qwen2" if tied else "llama",
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // (64 if wide else 32),
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.02 if wide else WEIGHT_STD,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_config(workspace: CheckWorkspace, *overrides: str, tied: bool = False) -> Config:
    """Builds the quickstart's config with the tiny model on the workspace's device."""
    defaults = [f"model.name={make_model_folder(workspace, tied)}", f"device={workspace.device}", *SMALL_RUN]
    defaults += GPU_OVERRIDES if workspace.device == "cuda" else ()
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        quickstart = compose("grpo_quickstart")
    return to_config(cast(DictConfig, OmegaConf.merge(quickstart, OmegaConf.from_dotlist([*defaults, *overrides]))))


@contextmanager
def open_run(workspace: CheckWorkspace, *overrides: str, tied: bool = False) -> Iterator[LockstepRun]:
    """Builds a run of grpo.py, and closes it at the end of the context."""
    folder = workspace.folder / "run"
    folder.mkdir(exist_ok=True)
    run = build_run(make_config(workspace, *overrides, tied=tied), folder, LockstepRun)
    try:
        yield run
    finally:
        run.close("finished")


def perturb_weights(model: nn.Module, seed: int) -> None:
    """Changes every trained weight as an update would: adapters from zero, others by a tenth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.copy_(0.2 * noise if "lora_" in name else parameter * (1 + 0.1 * noise))
