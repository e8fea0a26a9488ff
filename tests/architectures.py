"""Tiny random causal language models of many architectures, and folders to load them from.

tests/fixtures/data/architectures.jsonl has a line for each: its `model_type` and the fields of its
config.json. Windows, chunks and top-k of attention are 8, so that short rows reach beyond them.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parent
QUICKSTART = ROOT.parent / "torchgrpo" / "models" / "quickstart"


@dataclass(frozen=True)
class Architecture:
    """Config of one architecture.

    attention: "eager" where the architecture has no sdpa attention. scale: factor on parameters with more
    than one dimension, so that attention matters. causal: logits depend on no later token.
    """

    kind: str
    fields: dict[str, Any]
    attention: str = "sdpa"
    scale: float = 4.0
    causal: bool = True


def _read_architectures() -> dict[str, Architecture]:
    lines = (ROOT / "fixtures" / "data" / "architectures.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row.pop("name"): Architecture(**row) for row in rows}


ARCHITECTURES: Mapping[str, Architecture] = _read_architectures()


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """Builds the architecture's model with random weights, in float32 and ready for evaluation."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture.kind, **architecture.fields),
        dtype=torch.float32,
        attn_implementation=architecture.attention,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(architecture.scale)
    model.generation_config.eos_token_id = 2
    return model.eval()


def save_tiny(name: str, folder: Path) -> None:
    """Saves the model of `tiny` and the quickstart's tokenizer as a Hugging Face folder."""
    tiny(name).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / file, folder)
